"""Convolution and batch norm for many targets at once: the same numbers as torch's, with derivatives made for `vmap`.

Convolution: under `vmap` torch computes the weight gradients of N targets as a convolution in N groups, which is slow
on a GPU. Here they are one batched matrix product, while everything that all targets' shared weights allow stays one
large convolution. Batch norm: the second derivative of torch's under `vmap` is wrong (by 1e-3 of its size, torch
2.13), and an attack needs exactly that one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class _Convolve(torch.autograd.Function):
    """Images [B, C, H, W] and weights [O, C, k, k] to [B, O, H', W']."""

    generate_vmap_rule = True

    @staticmethod
    def forward(images: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int]) -> Tensor:
        return F.conv2d(images, weight, None, stride, padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        images, weight, ctx.stride, ctx.padding = inputs
        ctx.save_for_backward(images, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        images, weight = ctx.saved_tensors
        of_images = of_weight = None
        if ctx.needs_input_grad[0]:
            of_images = _transposed(gradient, weight, images.shape[-2:], ctx.stride, ctx.padding)
        if ctx.needs_input_grad[1]:
            columns = _columns(images, weight, ctx.stride, ctx.padding)
            of_weight = (gradient.transpose(0, 1).flatten(1) @ columns.mT).reshape(weight.shape)
        return of_images, of_weight, None, None


def _transposed(
    gradient: Tensor, weight: Tensor, size: torch.Size, stride: tuple[int, int], padding: tuple[int, int]
) -> Tensor:
    """The gradient with respect to the images, which are [.., *size]."""
    given = gradient.shape[-2:]
    kernel = weight.shape[-2:]
    extra = [size[i] - ((given[i] - 1) * stride[i] - 2 * padding[i] + kernel[i]) for i in (0, 1)]
    return F.conv_transpose2d(gradient, weight, None, stride, padding, extra)


def _columns(images: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int]) -> Tensor:
    """What each output pixel sees, [C·k·k, B·H'·W'].

    Not F.unfold, whose CUDA version starts one kernel per image.
    """
    padded = F.pad(images, (padding[1], padding[1], padding[0], padding[0]))
    windows = padded.unfold(2, weight.shape[2], stride[0]).unfold(3, weight.shape[3], stride[1])
    return windows.permute(1, 4, 5, 0, 2, 3).flatten(3).flatten(0, 2)


class ManyTargetsConv2d(nn.Conv2d):
    """A Conv2d without groups, dilation or unusual padding, for a batch of targets on a GPU."""

    def forward(self, input: Tensor) -> Tensor:
        output = _Convolve.apply(input, self.weight, self.stride, self.padding)
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
