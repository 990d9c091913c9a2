"""Products whose factors have 11 significant bits, kept in 16 bits on a GPU.

TF32 rounds the factors of a product to 11 significant bits and still reads 32 bits of each. Float16 has as many
significant bits in half the bytes, and a GPU multiplies it twice as fast. Its range is small: so every target's numbers
are first multiplied by a power of two, which rounds nothing, and the product is divided by it. Sums are
float32; a convolution writes them as float16, which rounds once more.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

#: the largest number after scaling; products of two such are summed in float32, where they fit by far
LARGEST = 2.0**14
#: the largest sum of a convolution, whose outputs are float16 as well
LARGEST_OUTPUT = 2.0**15


class Factor(NamedTuple):
    """A factor of a product [N, ...]; the product is multiplied by `undo` [N, 1, ...] where it is not None."""

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
        return all(room.are_right(device) for room in (triton_kernels, triton_layouts, triton_rows))
    except Exception as error:  # whatever a compiler may raise
        warnings.warn(f"attack: runs without fused passes, more slowly: {error}", stacklevel=2)
        return False


def factor(tensor: Tensor) -> Factor:
    """A factor [N, ...], in float16 where that may be; each of the N targets has a scale of its own."""
    return scaled(tensor, LARGEST) if in_half(tensor) else Factor(tensor)


def product(a: Factor, b: Factor) -> Tensor:
    """[N, m, k] times [N, k, n] in float32."""
    if a.undo is None or b.undo is None:
        return a.values @ b.values
    undo = (a.undo.flatten() * b.undo.flatten())[:, None, None]
    if not a.values.is_cuda:  # there is no product of float16 with sums of float32 on a CPU
        return (a.values.float() @ b.values.float()) * undo
    found = torch.bmm(a.values, b.values, out_dtype=torch.float32)
    return times_rows(found, undo, found)


def scaled(tensor: Tensor, largest: float) -> Factor:
    """[N, ...] in float16, each row times the power of two by which its largest number comes near `largest`."""
    scale = scale_of(tensor, largest)
    small = torch.empty(tensor.shape, dtype=torch.float16, device=tensor.device)
    return Factor(times_rows(tensor.contiguous(), scale, small), 1 / scale)


def scale_of(tensor: Tensor, largest: float = LARGEST) -> Tensor:
    """That power of two of each row, [N, 1, ...]."""
    axes = tuple(range(1, tensor.dim()))
    most = torch.linalg.vector_norm(tensor, torch.inf, axes, keepdim=True).clamp(min=1e-30)
    return torch.exp2(torch.floor(torch.log2(largest / most)))


def times_rows(numbers: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """[N, ...] times scale [N, 1, ...] into `out` in one pass, which rounds once."""
    if is_fused(numbers) and out.is_contiguous():
        from polyclinic.attacks.solvers import triton_kernels

        return triton_kernels.times(numbers, scale.flatten(), out)
    return torch.mul(numbers, scale, out=out)


def is_fused(tensor: Tensor) -> bool:
    """Whether passes over this tensor are Triton's, which take each number once from memory."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return tensor.is_cuda and tensor.is_contiguous() and not wrapped and passes_work(tensor.device)


class Convolution(torch.autograd.Function):
    """Images [N, C, H, W] and weights [O, C, k, k] of all to [N, O, H', W']; not to be differentiated."""

    @staticmethod
    def forward(images: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int]) -> Tensor:
        small, kernel, undo = _operands(images, weight, weight[0].numel())
        return _undone(F.conv2d(small, kernel, None, stride, padding), undo)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], images: Tensor, weight: Tensor, *window: Any) -> Any:
        if in_dims[1] is not None:  # every target has weights of its own
            own = torch.vmap(lambda x, w: F.conv2d(x, w, None, *window), in_dims[:2])
            return own(images, weight), 0
        merged = _merged(images, in_dims[0], info.batch_size)
        return Convolution.apply(merged, weight, *window).unflatten(0, (info.batch_size, -1)), 0


class Transposed(torch.autograd.Function):
    """The transpose of `Convolution` for fixed weights: [N, O, H', W'] to [N, C, H, W]; can be differentiated once."""

    @staticmethod
    def forward(
        outputs: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int], extra: tuple[int, int]
    ) -> Tensor:
        small, kernel, undo = _operands(outputs, weight, weight[:, 0].numel())
        return _undone(F.conv_transpose2d(small, kernel, None, stride, padding, extra), undo)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        outputs, weight, *ctx.window = inputs
        ctx.save_for_backward(outputs, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        outputs, weight = ctx.saved_tensors
        stride, padding, _ = ctx.window
        of_outputs = of_weight = None
        if ctx.needs_input_grad[0]:
            of_outputs = Convolution.apply(gradients[0], weight, stride, padding)
        if ctx.needs_input_grad[1]:
            of_weight = conv2d_weight(gradients[0], weight.shape, outputs, stride, padding)
        return of_outputs, of_weight, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], outputs: Tensor, weight: Tensor, *window: Any) -> Any:
        if in_dims[1] is not None:
            own = torch.vmap(lambda y, w: F.conv_transpose2d(y, w, None, *window), in_dims[:2])
            return own(outputs, weight), 0
        merged = _merged(outputs, in_dims[0], info.batch_size)
        return Transposed.apply(merged, weight, *window).unflatten(0, (info.batch_size, -1)), 0


def _operands(images: Tensor, weight: Tensor, terms: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images and weights in float16, so small that a sum of `terms` products has room."""
    kernel, of_weight = scaled(weight[None], 1.0)
    assert of_weight is not None
    if turns(images, weight):
        from polyclinic.attacks.solvers import triton_layouts

        scale = scale_of(images, LARGEST_OUTPUT / terms)
        small = triton_layouts.to_channels_last(images, scale.flatten())
        return small, kernel[0].contiguous(memory_format=torch.channels_last), of_weight[0] / scale
    small, undo = scaled(images, LARGEST_OUTPUT / terms)
    assert undo is not None
    return small, kernel[0], undo * of_weight[0]


def turns(images: Tensor, weight: Tensor) -> bool:
    """Whether a convolution gets channels last, which it wants for float16 on a GPU; of eight numbers at least."""
    return is_fused(images) and weight.shape[0] % 8 == 0 and weight.shape[1] % 8 == 0


def _undone(small: Tensor, undo: Tensor) -> Tensor:
    """The output of a convolution in float32."""
    if small.is_cuda and small.is_contiguous(memory_format=torch.channels_last) and not small.is_contiguous():
        from polyclinic.attacks.solvers import triton_layouts

        return triton_layouts.to_channels_first(small, undo.flatten())
    return times_rows(small, undo, torch.empty(small.shape, dtype=torch.float32, device=small.device))


def both_layouts(weights: Tensor) -> tuple[Factor, Factor]:
    """Weights [N, O, C, k, k] as factors [N, O, C·k·k] and [N, C, O·k·k]."""
    if in_half(weights) and is_fused(weights):
        from polyclinic.attacks.solvers import triton_layouts

        scale = scale_of(weights)
        along, across = triton_layouts.both_layouts(weights, scale.flatten())
        return Factor(along, 1 / scale), Factor(across, 1 / scale)
    whole = factor(weights)
    return Factor(whole.values.flatten(2), whole.undo), Factor(whole.values.transpose(1, 2).flatten(2), whole.undo)


def _merged(images: Tensor, axis: int | None, size: int) -> Tensor:
    """[N, B, ...] as [N B, ...]."""
    first = images.expand(size, *images.shape) if axis is None else images.movedim(axis, 0)
    return first.flatten(0, 1)
