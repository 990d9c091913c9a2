"""Convolution and batch norm for many targets at once: the same numbers as torch's, with derivatives made for `vmap`.

Convolution: under `vmap` torch computes the weight gradients of N targets as a convolution in N groups, which is slow
on a GPU. Here they are one batched matrix product of what each output pixel sees.
Batch norm: the second derivative of torch's under `vmap` is wrong (by 1e-3 of its size, torch 2.13), and an attack
needs exactly that one.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class _Columns(torch.autograd.Function):
    """What each output pixel sees: images [B, C, H, W] to [C·k·k, B·H'·W']. Its derivative is `_Images`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(images: Tensor, window: Window) -> Tensor:
        # not F.unfold, whose CUDA version starts one kernel per image
        (down, across), (pad_down, pad_across) = window.stride, window.padding
        padded = F.pad(images, (pad_across, pad_across, pad_down, pad_down))
        windows = padded.unfold(2, window.kernel[0], down).unfold(3, window.kernel[1], across)
        return windows.permute(1, 4, 5, 0, 2, 3).flatten(3).flatten(0, 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        images, ctx.window = inputs
        ctx.shape = images.shape

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Images.apply(gradients[0], ctx.window, ctx.shape), None


class _Images(torch.autograd.Function):
    """Columns [C·k·k, B·H'·W'] added up where their pixels lie in images [B, C, H, W]. Its derivative is `_Columns`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(columns: Tensor, window: Window, shape: torch.Size) -> Tensor:
        count, channels, *size = shape
        places = [window.output(side, axis) for axis, side in enumerate(size)]
        parts = columns.reshape(channels, *window.kernel, count, *places)
        room = [side + 2 * window.padding[axis] for axis, side in enumerate(size)]
        padded = columns.new_zeros(channels, count, *room)
        for i, j in itertools.product(*(range(side) for side in window.kernel)):  # k² sums of whole images
            rows, cols = (
                slice(at, at + window.stride[axis] * (places[axis] - 1) + 1, window.stride[axis])
                for axis, at in enumerate((i, j))
            )
            padded[:, :, rows, cols] += parts[:, i, j]
        (down, across), (height, width) = window.padding, size
        return padded[:, :, down : down + height, across : across + width].transpose(0, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.window, _ = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _Columns.apply(gradients[0], ctx.window), None, None


class Window(NamedTuple):
    """Kernel, stride and padding of a convolution, each down and across."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    def output(self, side: int, axis: int) -> int:
        """How many output pixels there are along an axis of so many input pixels."""
        return (side + 2 * self.padding[axis] - self.kernel[axis]) // self.stride[axis] + 1


class _Convolve(torch.autograd.Function):
    """Images [B, C, H, W] and weights [O, C, k, k] to [B, O, H', W'].

    What all targets' shared weights allow stays one large convolution; only the weights' gradients, which are each
    target's own, are a batched product of columns.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(images: Tensor, weight: Tensor, window: Window) -> Tensor:
        return F.conv2d(images, weight, None, window.stride, window.padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        images, weight, ctx.window = inputs
        ctx.save_for_backward(images, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (gradient,) = gradients
        images, weight = ctx.saved_tensors
        of_images = of_weight = None
        if ctx.needs_input_grad[0]:
            of_images = _transposed(gradient, weight, images.shape[-2:], ctx.window)
        if ctx.needs_input_grad[1]:
            columns = _Columns.apply(images, ctx.window)
            of_weight = (gradient.transpose(0, 1).flatten(1) @ columns.mT).reshape(weight.shape)
        return of_images, of_weight, None


def _transposed(gradient: Tensor, weight: Tensor, size: torch.Size, window: Window) -> Tensor:
    """The gradient with respect to the images, which are [.., *size]."""
    given, (kernel, stride, padding) = gradient.shape[-2:], window
    extra = [size[i] - ((given[i] - 1) * stride[i] - 2 * padding[i] + kernel[i]) for i in (0, 1)]
    return F.conv_transpose2d(gradient, weight, None, stride, padding, extra)


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


class _Normalise(torch.autograd.Function):
    """[B, C, H, W] to mean 0 and variance 1 in each channel, and 1 / standard deviation [1, C, 1, 1].

    Derivatives are written with the two outputs, so that they can be differentiated again.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(images: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        variance, mean = torch.var_mean(images, (0, 2, 3), correction=0, keepdim=True)
        scale = (variance + eps).rsqrt()
        return (images - mean) * scale, scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        of_normal, of_scale = gradients
        normal, scale = ctx.saved_tensors
        count = normal.numel() // normal.shape[1]
        along = (of_normal * normal).mean((0, 2, 3), keepdim=True) + of_scale * scale / count
        return scale * (of_normal - of_normal.mean((0, 2, 3), keepdim=True) - normal * along), None


class BatchStatistics2d(nn.BatchNorm2d):
    """Batch norm in training mode: normalises by the batch at hand, and leaves its running statistics alone."""

    def forward(self, input: Tensor) -> Tensor:
        if input.shape[0] * input.shape[2] * input.shape[3] == 1:
            raise ValueError("batch norm in training mode needs more than one value per channel")
        normal, _ = _Normalise.apply(input, self.eps)
        if not self.affine:
            return normal
        return normal * self.weight[:, None, None] + self.bias[:, None, None]
