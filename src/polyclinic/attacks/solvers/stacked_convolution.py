"""Convolution for `vmap` over weights: N targets, each with images and weights of its own.

Torch computes this as a convolution in N groups, which is slow on a GPU. Here it is one batched matrix product.
Convolution is linear in the images and in the weights, so the derivatives of three operations are these operations
again: convolve images, send gradients back to the images, and gather gradients of the weights. So any derivative can be
taken.
"""

from __future__ import annotations

from typing import Any

from torch import Size, Tensor
from torch.autograd import Function

from polyclinic.attacks.solvers.columns import (
    Window,
    by_channel,
    by_image,
    convolve_back,
    joined,
    seen_by_outputs,
)
from polyclinic.attacks.solvers.half_products import both_layouts

# images x [N, B, C, H, W], weights w [N, O, C, k, k], outputs or their gradients y [N, B, O, H', W']


class _Bilinear(Function):
    """What the three operations share: both inputs and the constants are kept, and `vmap` adds targets."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.window, ctx.size = inputs
        ctx.save_for_backward(*tensors)

    @classmethod
    def vmap(
        cls, info: Any, in_dims: tuple[int | None, ...], first: Tensor, second: Tensor, window: Window, size: Size
    ) -> tuple[Tensor, int]:
        count = info.batch_size
        merged = joined(first, in_dims[0], count), joined(second, in_dims[1], count)
        return cls.apply(*merged, window, size).unflatten(0, (count, -1)), 0


class Convolve(_Bilinear):
    """x, w -> y."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, window: Window, size: Size) -> Tensor:
        """`size`: of the images, (H, W)."""
        sides = [(size[i] + 2 * window.padding[i] - window.kernel[i]) // window.stride[i] + 1 for i in (0, 1)]
        shape = Size((x.shape[0], x.shape[1], w.shape[1], *sides))
        return by_image(w.flatten(2) @ seen_by_outputs(x, window), shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        y = gradients[0]
        of_x = SendBack.apply(y, w, ctx.window, ctx.size) if ctx.needs_input_grad[0] else None
        of_w = Gather.apply(y, x, ctx.window, ctx.size) if ctx.needs_input_grad[1] else None
        return of_x, of_w, None, None


class SendBack(_Bilinear):
    """y, w -> x: the transpose of `Convolve` for fixed weights."""

    @staticmethod
    def forward(y: Tensor, w: Tensor, window: Window, size: Size) -> Tensor:
        return convolve_back(y, *both_layouts(w), window, Size((*y.shape[:2], w.shape[2], *size)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        y, w = ctx.saved_tensors
        x = gradients[0]
        of_y = Convolve.apply(x, w, ctx.window, ctx.size) if ctx.needs_input_grad[0] else None
        of_w = Gather.apply(y, x, ctx.window, ctx.size) if ctx.needs_input_grad[1] else None
        return of_y, of_w, None, None


class Gather(_Bilinear):
    """y, x -> w: the transpose of `Convolve` for fixed images."""

    @staticmethod
    def forward(y: Tensor, x: Tensor, window: Window, size: Size) -> Tensor:
        return (by_channel(y) @ seen_by_outputs(x, window).mT).unflatten(2, (x.shape[2], *window.kernel))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        y, x = ctx.saved_tensors
        w = gradients[0]
        of_y = Convolve.apply(x, w, ctx.window, ctx.size) if ctx.needs_input_grad[0] else None
        of_x = SendBack.apply(y, w, ctx.window, ctx.size) if ctx.needs_input_grad[1] else None
        return of_y, of_x, None, None
