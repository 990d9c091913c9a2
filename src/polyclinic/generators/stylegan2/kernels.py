"""Triton kernels for what StyleGAN2 does between its convolutions: a GPU reads and writes each feature map once there.

PyTorch would make a pass over memory for each factor, bias, noise and activation, and two products for each filter.
Feature maps are [B, C, H, W] with channels last. Sums are computed in fp32 and in a fixed order, so a result is the
same every time. `finished` has first and second derivatives, which regularisers need; `filtered` has all of them.

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
    """A while in which layers may use these kernels: first and second derivatives are enough."""
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
    # here and not in the function below, so that its derivative reaches the x that was given
    return _Finished.apply(x.contiguous(memory_format=torch.channels_last), rule, factors, bias, noise)


def filtered(x: Tensor, side: int, before: int, stride: int = 1) -> Tensor:
    """x filtered with [1, 3, 3, 1] / 8 along both sides, of every `stride`-th pixel: see `layers.swept`."""
    return _Filtered.apply(x, FilterPlan(x.shape[-1], side, before, stride))


# --- factors, bias, noise, activation -----------------------------------------------------------------


class _Finished(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rule: Rule, *others: Tensor | None) -> Tensor:
        from polyclinic.generators.stylegan2 import triton_kernels

        y = torch.empty_like(x)
        ctx.rule = rule
        ctx.save_for_backward(x, *others)
        triton_kernels.finish(x, y, rule, *others)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *others = ctx.saved_tensors
        of_x, *found = _FinishedGradients.apply(gradient, x, ctx.rule, *others)
        return of_x, None, *found


class _FinishedGradients(torch.autograd.Function):
    """The gradients of x, factors, bias and noise. Where the activation bends they have no derivative, as in PyTorch:
    they depend on the gradient that comes in, on x through the factors', and on the factors through that of x."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, x: Tensor, rule: Rule, *others: Tensor | None) -> tuple[Tensor | None, ...]:
        from polyclinic.generators.stylegan2 import triton_kernels

        gradient = gradient.contiguous(memory_format=torch.channels_last)
        ctx.rule = rule
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(gradient, x, *others)
        of_x, *found = triton_kernels.finish_back(gradient, x, rule, *others)
        kept = zip(found, others, strict=True)
        return of_x, *(None if one is None else made.to(one.dtype) for made, one in kept)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *changes: Tensor | None) -> tuple[Tensor | None, ...]:
        """`changes`: how much what follows depends on each of the gradients."""
        from polyclinic.generators.stylegan2 import triton_kernels

        if all(one is None for one in changes):
            return (None,) * 6
        gradient, x, *others = ctx.saved_tensors
        of_x = changes[0]
        laid_out = None if of_x is None else of_x.contiguous(memory_format=torch.channels_last)
        found = triton_kernels.finish_twice(gradient, x, ctx.rule, others, (laid_out, *changes[1:]))
        of_gradient, again_x, of_factors = found
        factors = None if of_factors is None else of_factors.to(others[0].dtype)
        return of_gradient, again_x, None, factors, None, None


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
