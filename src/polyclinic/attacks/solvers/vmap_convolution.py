"""Convolution with fast weight gradients under `vmap`: shared weights, N targets, each with a gradient of its own.

Under `vmap` torch computes the weight gradients of N targets as a convolution in N groups, which is slow on a GPU. Here
they are one batched matrix product. The outputs, and the gradients of the images, are one large convolution, since all
targets share the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from polyclinic.attacks.solvers import half_convolutions, stacked_convolution
from polyclinic.attacks.solvers.columns import Window, by_channel, by_image, columns_of, convolve_back, joined
from polyclinic.attacks.solvers.half_products import (
    Factor,
    both_layouts,
    factor,
    in_half,
    product,
    product_to_undo,
    undo_of,
    undone,
)


class _Convolve(torch.autograd.Function):
    """Images [N, B, C, H, W] of N targets and the weights [O, C, k, k] of all to outputs [N, B, O, H', W'].

    Also returns what the derivatives use again where products are in 16 bits: what undoes the scale of the images
    [N·B], and the weights as a kernel with what undoes its scale [1].
    """

    @staticmethod
    def forward(images: Tensor, weight: Tensor, window: Window) -> tuple[Tensor | None, ...]:
        every = images.flatten(0, 1).contiguous()
        if not in_half(images):
            found = F.conv2d(every, weight, None, window.stride, window.padding)
            return found.unflatten(0, images.shape[:2]), None, None, None
        undo, kernel = undo_of(every), half_convolutions.kernel_of(weight)
        found = half_convolutions.convolve(every, undo, kernel, window)
        return found.unflatten(0, images.shape[:2]), undo, *kernel

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        images, weight, ctx.window = inputs
        ctx.mark_non_differentiable(*(one for one in output[1:] if one is not None))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(images, weight, *output[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if gradients[0] is None:  # nothing depends on the outputs
            return None, None, None
        wanted = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        of_images, of_weight, *_ = _ConvolveBackward.apply(gradients[0], *ctx.saved_tensors, ctx.window, wanted)
        if of_weight is not None:  # the derivative of [0] would fill and copy a tensor of all weights
            of_weight = of_weight.squeeze(0) if len(of_weight) == 1 else of_weight.sum(0)
        return of_images, of_weight, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], images: Tensor, weight: Tensor, window: Window
    ) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
        """More targets: they join those that are there."""
        size = info.batch_size
        merged = joined(images, in_dims[0], size)
        if in_dims[1] is not None:  # every target has weights of its own
            own = _for_each(weight, in_dims[1], merged)
            found = stacked_convolution.Convolve.apply(merged, own, window, merged.shape[-2:])
            return (_apart(found, size), None, None, None), (0, None, None, None)
        found, undo, *kernel = _Convolve.apply(merged, weight, window)
        return (_apart(found, size), _apart(undo, size), *kernel), (0, None if undo is None else 0, None, None)


class _ConvolveBackward(torch.autograd.Function):
    """The derivatives of `_Convolve`: the gradient g [N, B, O, H', W'] to that of the images [N, B, C, H, W], and to
    that of the weights for each target [N, O, C, k, k]; None for what is not `wanted`.

    Also returns what its own derivative uses again: what each output pixel sees, [N, C·k·k, B·H'·W'], and what undoes
    the scale of g [N·B].
    """

    @staticmethod
    def forward(
        g: Tensor, images: Tensor, weight: Tensor, undo: Tensor | None, kernel: Tensor | None,
        kernel_undo: Tensor | None, window: Window, wanted: tuple[bool, bool],
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        every = g.flatten(0, 1).contiguous()
        g_undo = None if kernel is None else undo_of(every)
        of_images = of_weight = seen = None
        if wanted[0]:
            back = _transposed(every, g_undo, weight, _kernel(kernel, kernel_undo), window, images.shape[-2:])
            of_images = back.unflatten(0, g.shape[:2])
        if wanted[1]:
            seen, scale = columns_of(images, window, undo=_of_targets(undo, images))
            found = product(factor(by_channel(g), _of_targets(g_undo, g)), Factor(seen.mT, scale))
            of_weight = found.unflatten(2, (images.shape[2], *window.kernel))
        return of_images, of_weight, seen, g_undo

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        g, images, weight, undo, kernel, kernel_undo, ctx.window, _ = inputs
        ctx.shape = images.shape
        ctx.mark_non_differentiable(*(one for one in output[2:] if one is not None))
        ctx.set_materialize_grads(False)  # else zeros would be written for what each pixel sees
        ctx.save_for_backward(g, weight, undo, kernel, kernel_undo, *output[2:])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        v_images, v_weight = gradients[:2]
        g, weight, undo, kernel, kernel_undo, seen, g_undo = ctx.saved_tensors
        along = across = of_g = of_images = of_weight = None
        if v_weight is not None:
            along, across = both_layouts(v_weight.contiguous())
        if ctx.needs_input_grad[0]:
            plus = None if along is None else product_to_undo(along, Factor(seen, _of_targets(undo, g)))
            of_g = _sum_of_both(v_images, weight, _kernel(kernel, kernel_undo), ctx.window, plus, g.shape)
        if ctx.needs_input_grad[1] and v_weight is not None:
            of_images = convolve_back(g, along, across, ctx.window, ctx.shape, _of_targets(g_undo, g))
        if ctx.needs_input_grad[2] and v_images is not None:
            each = (v_images.flatten(0, 1), weight.shape, g.flatten(0, 1), ctx.window.stride, ctx.window.padding)
            of_weight = conv2d_weight(*each)
        return of_g, of_images, of_weight, *(None,) * 5

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], g: Tensor, images: Tensor, weight: Tensor, undo: Tensor | None,
        kernel: Tensor | None, kernel_undo: Tensor | None, window: Window, wanted: tuple[bool, bool],
    ) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:  # fmt: skip
        """More targets: they join those that are there."""
        size = info.batch_size
        g, images = joined(g, in_dims[0], size), joined(images, in_dims[1], size)
        if in_dims[2] is not None:
            found = _of_own_weights(g, images, _for_each(weight, in_dims[2], images), window, wanted)
        else:
            every = None if undo is None else joined(undo, in_dims[3], size)
            found = _ConvolveBackward.apply(g, images, weight, every, kernel, kernel_undo, window, wanted)
        return tuple(_apart(one, size) for one in found), tuple(None if one is None else 0 for one in found)


def _kernel(values: Tensor | None, undo: Tensor | None) -> Factor | None:
    return None if values is None else Factor(values, undo)


def _transposed(
    gradient: Tensor, undo: Tensor | None, weight: Tensor, kernel: Factor | None, window: Window, size: torch.Size
) -> Tensor:
    """The gradient of images [M, C, *size] from that of the outputs [M, O, H', W']."""
    if kernel is not None and undo is not None:
        return half_convolutions.transpose(gradient, undo, kernel, window, size)
    extra = window.extra(gradient.shape[-2:], size)
    return F.conv_transpose2d(gradient, weight, None, window.stride, window.padding, extra)


def _sum_of_both(
    v_images: Tensor | None,
    weight: Tensor,
    kernel: Factor | None,
    window: Window,
    plus: Factor | None,
    shape: torch.Size,
) -> Tensor | None:
    """The derivative by g, which is `shape`: images that are convolved, and a product [N, O, B·H'·W']."""
    if plus is not None:
        undo = None if plus.undo is None else plus.undo[:, None].expand(shape[:2]).flatten().contiguous()
        plus = Factor(by_image(plus.values, shape).flatten(0, 1).contiguous(), undo)
    if v_images is None:
        return None if plus is None else undone(plus).unflatten(0, shape[:2])
    every = v_images.flatten(0, 1).contiguous()
    if kernel is None:
        found = F.conv2d(every, weight, None, window.stride, window.padding)
        found = found if plus is None else found + undone(plus)
    else:
        added = None if plus is None or plus.undo is None else half_convolutions.ToAdd(plus.values, plus.undo)
        found = half_convolutions.convolve(every, undo_of(every), kernel, window, added)
        found = found if added is not None or plus is None else found + plus.values
    return found.unflatten(0, shape[:2])


def _of_own_weights(
    g: Tensor, images: Tensor, weights: Tensor, window: Window, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, ...]:
    """What `_ConvolveBackward` returns, where each target has weights of its own."""
    of_images = of_weight = None
    if wanted[0]:
        of_images = stacked_convolution.SendBack.apply(g, weights, window, images.shape[-2:])
    if wanted[1]:
        of_weight = stacked_convolution.Gather.apply(g, images, window, images.shape[-2:])
    return of_images, of_weight, None, None


def _of_targets(undo: Tensor | None, images: Tensor) -> Tensor | None:
    """[N·B] as [N], for images [N, B, ...]: a target's scale is that of its largest image."""
    if undo is None or images.shape[1] == 1:
        return undo
    return undo.view(images.shape[:2]).amax(1)


def _for_each(weights: Tensor, dim: int, images: Tensor) -> Tensor:
    """Weights [O, C, k, k] of targets that `vmap` added, for each of the images [N, ...] that they joined."""
    first = weights.movedim(dim, 0)
    each = len(images) // len(first)
    return first if each == 1 else first.repeat_interleave(each, 0)


def _apart(tensor: Tensor | None, size: int) -> Tensor | None:
    return None if tensor is None else tensor.unflatten(0, (size, -1))


class ManyTargetsConv2d(nn.Conv2d):
    """A Conv2d without groups, dilation or unusual padding, for a batch of targets on a GPU. It can be differentiated
    twice. Targets share its weights, or `vmap` gives each its own."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() == 3:  # an image without a batch
            return super().forward(input)
        window = Window(self.kernel_size, self.stride, self.padding)  # type: ignore[arg-type]
        output = _Convolve.apply(input.unsqueeze(0), self.weight, window)[0].squeeze(0)
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
