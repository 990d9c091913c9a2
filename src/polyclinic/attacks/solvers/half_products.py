"""Products whose factors have 11 significant bits, kept in 16 bits on a GPU.

TF32 rounds the factors of a product to 11 significant bits and still reads 32 bits of each. Float16 has as many
significant bits in half the bytes, and a GPU multiplies it twice as fast. Its range is small: so every target's numbers
are first multiplied by a power of two, and the product is divided by it. Scaling changes no digit, except of numbers
that are 2^28 times smaller than the largest one of their target. Sums are float32; a convolution writes them as
float16, which rounds once more.
"""

from __future__ import annotations

import functools
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

#: the largest number after scaling; products of two such are summed in float32, where they fit by far
LARGEST = 2.0**14


class Factor(NamedTuple):
    """A factor of a product [N, ...]; the product is multiplied by `undo` [N] where it is not None."""

    values: Tensor
    undo: Tensor | None = None


def in_half(tensor: Tensor) -> bool:
    """Whether products of this tensor have factors of 16 bits: where a GPU is allowed TF32. Without Triton, the passes
    that round and scale would take longer than the products gain."""
    allowed = torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32
    return tensor.is_cuda and tensor.dtype == torch.float32 and allowed and passes_work(tensor.device)


@functools.cache
def passes_work(device: torch.device) -> bool:
    """Whether Triton's passes give what torch gives; tried once in a process."""
    from polyclinic.generators.triton_check import kernels_work  # here: the attacks' benchmarks need torch only

    if not kernels_work(device):
        return False
    from polyclinic.attacks.solvers import triton_kernels, triton_layouts, triton_rows

    try:
        return all(module.are_right(device) for module in (triton_kernels, triton_layouts, triton_rows))
    except Exception as error:  # whatever a compiler may raise
        warnings.warn(f"attack: runs without fused passes, more slowly: {error}", stacklevel=2)
        return False


def is_fused(tensor: Tensor) -> bool:
    """Whether passes over this tensor are Triton's, which take each number once from memory."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return tensor.is_cuda and tensor.is_contiguous() and not wrapped and passes_work(tensor.device)


def undo_of(tensor: Tensor, largest: float = LARGEST) -> Tensor:
    """What undoes the scale of each row of [N, ...]: 1 divided by the power of two by which the row's largest number
    comes near `largest`."""
    if is_fused(tensor) and tensor.dtype == torch.float32:
        from polyclinic.attacks.solvers import triton_kernels

        return triton_kernels.undo_of(tensor, largest)
    most = torch.linalg.vector_norm(tensor.flatten(1), torch.inf, 1).clamp(min=1e-30)
    return torch.exp2(-torch.floor(torch.log2(largest / most)))


def scaled(tensor: Tensor, undo: Tensor) -> Factor:
    """[N, ...] in float16, each row divided by what undoes its scale."""
    small = torch.empty(tensor.shape, dtype=torch.float16, device=tensor.device)
    return Factor(times_rows(tensor.contiguous(), 1 / undo, small), undo)


def factor(tensor: Tensor, undo: Tensor | None = None) -> Factor:
    """A factor [N, ...], in float16 where that may be; each of the N targets has a scale of its own. `undo`: of this
    tensor, where it is known."""
    if not in_half(tensor):
        return Factor(tensor)
    tensor = tensor.contiguous()
    return scaled(tensor, undo_of(tensor) if undo is None else undo)


def product(a: Factor, b: Factor) -> Tensor:
    """[N, m, k] times [N, k, n] in float32."""
    return undone(product_to_undo(a, b))


def product_to_undo(a: Factor, b: Factor) -> Factor:
    """The product that is still to be multiplied by `undo`."""
    if a.undo is None or b.undo is None:
        return Factor(a.values @ b.values)
    if not a.values.is_cuda:  # there is no product of float16 with sums of float32 on a CPU
        return Factor(a.values.float() @ b.values.float(), a.undo * b.undo)
    return Factor(torch.bmm(a.values, b.values, out_dtype=torch.float32), a.undo * b.undo)


def undone(found: Factor) -> Tensor:
    return found.values if found.undo is None else times_rows(found.values, found.undo, found.values)


def times_rows(numbers: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """[N, ...] times scale [N] into `out` in one pass, which rounds once."""
    if is_fused(numbers) and out.is_contiguous():
        from polyclinic.attacks.solvers import triton_kernels

        return triton_kernels.times(numbers, scale.contiguous(), out)  # a derivative of a sum is one number, N times
    return torch.mul(numbers, by_row(scale, numbers), out=out)


def by_row(scale: Tensor, numbers: Tensor) -> Tensor:
    """[N] as [N, 1, ...], with as many dimensions as the numbers."""
    return scale.view(-1, *(1,) * (numbers.dim() - 1))


def both_layouts(weights: Tensor) -> tuple[Factor, Factor]:
    """Weights [N, O, C, k, k] as factors [N, O, C·k·k] and [N, C, O·k·k]."""
    if in_half(weights) and is_fused(weights):
        from polyclinic.attacks.solvers import triton_layouts

        undo = undo_of(weights)
        along, across = triton_layouts.both_layouts(weights, 1 / undo)
        return Factor(along, undo), Factor(across, undo)
    whole = factor(weights)
    return Factor(whole.values.flatten(2), whole.undo), Factor(whole.values.transpose(1, 2).flatten(2), whole.undo)
