"""Convolution with fast weight gradients under `vmap`: shared weights, N targets, each with a gradient of its own.

Under `vmap` torch computes the weight gradients of N targets as a convolution in N groups, which is slow on a GPU. Here
they are one batched matrix product, while all that shared weights allow stays one large convolution.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.attacks.solvers.half_products import (
    Convolution,
    Factor,
    Transposed,
    both_layouts,
    factor,
    in_half,
    is_fused,
    product,
    scale_of,
)


class Window(NamedTuple):
    """Kernel, stride and padding of a convolution, each down and across."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]


class _Convolve(torch.autograd.Function):
    """Images [B, C, H, W] and weights [O, C, k, k] to [B, O, H', W']."""

    generate_vmap_rule = True

    @staticmethod
    def forward(images: Tensor, weight: Tensor, window: Window) -> Tensor:
        if in_half(images):
            return Convolution.apply(images, weight, window.stride, window.padding)
        return F.conv2d(images, weight, None, window.stride, window.padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        images, weight, ctx.window = inputs
        ctx.save_for_backward(images, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        images, weight = ctx.saved_tensors
        of_images = of_weight = None
        if ctx.needs_input_grad[0]:
            of_images = _transposed(gradient, weight, images.shape[-2:], ctx.window)
        if ctx.needs_input_grad[1]:
            found = _WeightGradients.apply(gradient[None], images[None], ctx.window)[0]
            of_weight = found.squeeze(0)  # the derivative of [0] would fill and copy a tensor of all weights
        return of_images, of_weight, None


def _transposed(gradient: Tensor, weight: Tensor, size: torch.Size, window: Window) -> Tensor:
    """The gradient with respect to the images, which are [.., *size]."""
    (_, stride, padding), given, kernel = window, gradient.shape[-2:], window.kernel
    high, wide = (size[i] - ((given[i] - 1) * stride[i] - 2 * padding[i] + kernel[i]) for i in (0, 1))
    extra = (high, wide)
    if in_half(gradient):
        return Transposed.apply(gradient, weight, stride, padding, extra)
    return F.conv_transpose2d(gradient, weight, None, stride, padding, extra)


class _WeightGradients(torch.autograd.Function):
    """For N targets: gradients [N, B, O, H', W'] and images [N, B, C, H, W] to weight gradients [N, O, C, k, k].

    Also returns what the derivative uses again: what each output pixel sees, [N, C·k·k, B·H'·W'] as a factor, and what
    undoes the scale of the gradients.
    """

    @staticmethod
    def forward(gradient: Tensor, images: Tensor, window: Window) -> tuple[Tensor | None, ...]:
        columns, outputs = columns_of(images, window), factor(by_channel(gradient))
        found = product(outputs, Factor(columns.values.mT, columns.undo))
        return found.unflatten(2, (images.shape[2], *window.kernel)), *columns, outputs.undo

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        gradient, images, ctx.window = inputs
        ctx.shape = images.shape
        ctx.mark_non_differentiable(*(one for one in output[1:] if one is not None))
        ctx.set_materialize_grads(False)  # else zeros would be written for what each pixel sees
        ctx.save_for_backward(gradient, *output[1:])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient, *columns, undo = ctx.saved_tensors
        along, across = both_layouts(gradients[0])
        of_gradient = of_images = None
        if ctx.needs_input_grad[0]:
            of_gradient = by_image(product(along, Factor(*columns)), gradient.shape)
        if ctx.needs_input_grad[1]:
            of_images = convolve_back(gradient, along, across, ctx.window, ctx.shape, undo)
        return of_gradient, of_images, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], gradient: Tensor, images: Tensor, window: Window
    ) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
        """More targets: they join those that are there."""
        size = info.batch_size
        merged = [vmapped_first(t, d, size).flatten(0, 1) for t, d in ((gradient, in_dims[0]), (images, in_dims[1]))]
        found = _WeightGradients.apply(*merged, window)
        apart = tuple(None if one is None else one.unflatten(0, (size, -1)) for one in found)
        return apart, tuple(None if one is None else 0 for one in found)


def by_channel(images: Tensor) -> Tensor:
    """[N, B, O, H, W] to [N, O, B·H·W]; a view of single images."""
    return images.transpose(1, 2).flatten(2)


def by_image(rows: Tensor, shape: torch.Size) -> Tensor:
    """[N, O, B·H·W] to [N, B, O, H, W], which is `shape`."""
    return rows.unflatten(2, (shape[1], *shape[3:])).transpose(1, 2)


def seen_by_outputs(images: Tensor, window: Window) -> Tensor:
    """What each output pixel sees: [N, B, C, H, W] to [N, C·k·k, B·H'·W']."""
    count, batch = images.shape[:2]
    every = images.flatten(0, 2)[None]  # all as channels of one image: torch would start a kernel per image
    seen = F.unfold(every, window.kernel, 1, window.padding, window.stride)
    return seen.view(count, batch, -1, seen.shape[-1]).transpose(1, 2).flatten(2)


def columns_of(images: Tensor, window: Window, *, turned: bool = False, undo: Tensor | None = None) -> Factor:
    """`seen_by_outputs` as a factor of a product; `turned`: what a kernel sees that is turned by half a circle. `undo`:
    of these images as a factor, where that is known."""
    if in_half(images) and images.shape[1] == 1 and is_fused(images):
        from polyclinic.attacks.solvers import triton_kernels

        scale = scale_of(images) if undo is None else 1 / undo
        return Factor(triton_kernels.columns(images[:, 0], scale.flatten(), *window, turned=turned), 1 / scale)
    small = factor(images)  # rounded before it is spread, as it then is larger by k·k
    if not turned:
        return Factor(seen_by_outputs(small.values, window), small.undo)
    seen = seen_by_outputs(small.values, window).unflatten(1, (-1, *window.kernel))
    return Factor(seen.flip(2, 3).flatten(1, 3), small.undo)


def convolve_back(
    gradient: Tensor, along: Factor, across: Factor, window: Window, shape: torch.Size, undo: Tensor | None = None
) -> Tensor:
    """The gradient of images, `shape`, that N targets convolve with weights of their own, in `both_layouts`. `undo`: of
    the gradient as a factor, where that is known.

    Without strides it is a convolution as well, by a kernel turned by half a circle: what that sees is found thrice as
    fast on a GPU as columns are added up.
    """
    around = (window.kernel[0] - 1 - window.padding[0], window.kernel[1] - 1 - window.padding[1])
    if window.stride == (1, 1) and min(around) >= 0:
        columns = columns_of(gradient, Window(window.kernel, (1, 1), around), turned=True, undo=undo)
        return by_image(product(across, columns), shape)
    back = product(Factor(along.values.mT, along.undo), factor(by_channel(gradient)))
    seen = back.unflatten(2, (shape[1], -1)).transpose(1, 2).reshape(1, -1, back.shape[2] // shape[1])
    return F.fold(seen, shape[-2:], window.kernel, 1, window.padding, window.stride).view(shape)


def vmapped_first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """The tensor with the dimension that `vmap` added in front."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


class ManyTargetsConv2d(nn.Conv2d):
    """A Conv2d without groups, dilation or unusual padding, for a batch of targets on a GPU."""

    def forward(self, input: Tensor) -> Tensor:
        window = Window(self.kernel_size, self.stride, self.padding)  # type: ignore[arg-type]
        output = _Convolve.apply(input, self.weight, window)
        return output if self.bias is None else output + self.bias[:, None, None]

    @staticmethod
    def can_replace(layer: nn.Module) -> bool:
        return (
            type(layer) is nn.Conv2d
            and layer.groups == 1
            and layer.dilation == (1, 1)
            and layer.padding_mode == "zeros"
            and not isinstance(layer.padding, str)
        )
