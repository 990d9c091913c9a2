"""Triton kernels for what StyleGAN2 does between its convolutions: a GPU reads and writes each feature map once there.

PyTorch would make a pass over memory for each factor, bias, noise and activation, and two products for each filter.
Feature maps are [B, C, H, W] with channels last. Sums are computed in fp32 and in a fixed order, so a result is the
same every time. Only first derivatives of `finished` and `scaled` are known; `filtered` has all of them.

PyTorch for NVIDIA's GPUs brings Triton along. Without it, without the C compiler that it needs, and with
`engine.reproducible`, layers do as before.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyclinic.generators.triton_check import kernels_work

_WANTED = contextvars.ContextVar("fused", default=False)


@contextlib.contextmanager
def fused() -> Iterator[None]:
    """A while in which layers may use these kernels: their first derivatives are enough."""
    token = _WANTED.set(True)
    try:
        yield
    finally:
        _WANTED.reset(token)


def usable(x: Tensor) -> bool:
    """Whether a layer uses them for feature maps x."""
    return _WANTED.get() and filters_are_usable(x)


def filters_are_usable(x: Tensor) -> bool:
    """Whether a layer uses `filtered`, which has derivatives of all orders."""
    if not x.is_cuda or torch.compiler.is_compiling():
        return False
    return not torch.are_deterministic_algorithms_enabled() and kernels_work(x.device)


class Rule(NamedTuple):
    """gain · x, or of that a leaky ReLU; slope 1 means none."""

    gain: float = 1.0
    slope: float = 1.0


def finished(x: Tensor, rule: Rule, factors: Tensor | None, bias: Tensor | None, noise: Tensor | None) -> Tensor:
    """The rule applied to x · factors + bias + noise: factors [B, C], bias [C], noise [B, H · W]; None for none."""
    return _Finished.apply(x, rule, factors, bias, noise)


def filtered(x: Tensor, side: int, before: int, stride: int = 1) -> Tensor:
    """x filtered with [1, 3, 3, 1] / 8 along both sides, of every `stride`-th pixel: see `layers.swept`."""
    return _Filtered.apply(x, FilterPlan(x.shape[-1], side, before, stride))


# --- factors, bias, noise, activation -----------------------------------------------------------------


class _Finished(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rule: Rule, *others: Tensor | None) -> Tensor:
        from polyclinic.generators.stylegan2 import triton_kernels

        x = x.contiguous(memory_format=torch.channels_last)
        y = torch.empty_like(x)
        ctx.rule = rule
        ctx.save_for_backward(x, *others)
        triton_kernels.finish(x, y, rule, *others)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from polyclinic.generators.stylegan2 import triton_kernels

        x, *others = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        of_x, *found = triton_kernels.finish_back(gradient, x, ctx.rule, *others)
        kept = zip(found, others, strict=True)
        return of_x, None, *(None if one is None else made.to(one.dtype) for made, one in kept)


# --- filters ------------------------------------------------------------------------------------------


class FilterPlan(NamedTuple):
    """From images of one side to those of another. `back`: the transposed filter, from `side` to `inputs`."""

    inputs: int
    side: int
    before: int
    stride: int
    back: bool = False

    def transposed(self) -> FilterPlan:
        return self._replace(back=not self.back)


class _Filtered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: FilterPlan) -> Tensor:
        from polyclinic.generators.stylegan2 import triton_kernels

        ctx.plan = plan
        return triton_kernels.sweep(x.contiguous(memory_format=torch.channels_last), plan)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Filtered.apply(gradient, ctx.plan.transposed()), None
