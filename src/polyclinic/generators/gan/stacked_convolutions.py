"""Convolutions of 4x4 pixels with stride 2, and their transposes, of many stacked networks as matrix products.

On a GPU `torch.func.vmap` makes grouped convolutions of such a stack, for which there are no fast kernels when groups
are small; a batch of products of patches has them. Cutting images into patches and adding up overlapping patches are
each other's derivative, and are written so: autograd's own would go view by view, and take most of a step's time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.training.gpu.stacked_layers import AllAtOnce, in_autocast


def halve_stacked(images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.conv2d(images, weight, bias, stride=2, padding=1)` of each network; weights [M, O, C, 4, 4], even sides."""
    many, count, _, rows, columns = images.shape
    kernel = weight.permute(0, 3, 4, 2, 1).reshape(many, -1, weight.shape[1])
    found = torch.bmm(_Patches.apply(images), kernel)
    if bias is not None:
        found = found + bias.to(found.dtype)[:, None]
    return found.reshape(many, count, rows // 2, columns // 2, -1).permute(0, 1, 4, 2, 3)


def double_stacked(images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.conv_transpose2d(images, weight, bias, stride=2, padding=1)` of each network, for weights [M, C, O, 4, 4]."""
    many, count, channels, rows, columns = images.shape
    kernel = weight.permute(0, 1, 3, 4, 2).reshape(many, channels, -1)
    products = torch.bmm(images.permute(0, 1, 3, 4, 2).reshape(many, -1, channels), kernel)
    found = _Overlaid.apply(products, (count, 2 * rows, 2 * columns))
    return found if bias is None else found + bias.to(found.dtype)[:, None, :, None, None]


class _Patches(torch.autograd.Function):
    """Images [M, B, C, H, W] to the 4x4 pixels that each output of a convolution sees, [M, B H/2 W/2, 16 C]; around an
    image there are zeros. Its derivative is `_Overlaid`."""

    @staticmethod
    def forward(ctx: Any, images: Tensor) -> Tensor:
        many, count, channels, rows, columns = images.shape
        ctx.shape = (count, rows, columns)
        framed = images.new_zeros(many, count, rows + 2, columns + 2, channels)
        framed[:, :, 1:-1, 1:-1] = images.permute(0, 1, 3, 4, 2)
        network, image, row, column, _ = framed.stride()
        shape = (many, count, rows // 2, columns // 2, 4, 4 * channels)
        views = framed.as_strided(shape, (network, image, 2 * row, 2 * column, row, 1))
        return views.reshape(many, -1, 16 * channels)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _Overlaid.apply(gradient, ctx.shape)


class _Overlaid(torch.autograd.Function):
    """Patches [M, B H/2 W/2, 16 C] added up where they overlap, to images [M, B, C, H, W]: the derivative of
    `_Patches`, whose derivative is this one."""

    @staticmethod
    def forward(ctx: Any, patches: Tensor, shape: tuple[int, int, int]) -> Tensor:
        (count, rows, columns), many, channels = shape, len(patches), patches.shape[-1] // 16
        high, wide = rows // 2, columns // 2
        parts = patches.reshape(many, count, high, wide, 2, 2, 2, 2, channels)
        framed = patches.new_empty(many, count, high + 1, 2, wide + 1, 2, channels)
        framed[:, :, high] = 0
        framed[:, :, :, :, wide] = 0
        for down in (0, 1):
            for right in (0, 1):
                part = parts[:, :, :, :, down, :, right].permute(0, 1, 2, 4, 3, 5, 6)
                place = framed[:, :, down : down + high, :, right : right + wide]
                if down or right:
                    place += part
                else:
                    place.copy_(part)
        return framed.reshape(many, count, rows + 2, columns + 2, channels)[:, :, 1:-1, 1:-1].permute(0, 1, 4, 2, 3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Patches.apply(gradient), None


def _halve_stacked(images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    images, weight = in_autocast(images, weight)
    return halve_stacked(images, weight, bias)


def _double_stacked(images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    images, weight = in_autocast(images, weight)
    return double_stacked(images, weight, bias)


# --- layers -------------------------------------------------------------------------------------------


class Down(nn.Conv2d):
    """A convolution that halves the side; `as_products` says how it is computed in a stack of networks, not what."""

    as_products = False
    in_order = False  # whether what it gives must lie channel by channel in memory

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__(channels, outputs, 4, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.apply_weight(images, self.weight)

    def apply_weight(self, images: Tensor, weight: Tensor) -> Tensor:
        if not self.as_products:
            return F.conv2d(images, weight, self.bias, self.stride, self.padding)
        found = AllAtOnce.apply(_halve_stacked, images, weight, self.bias)
        return found.contiguous() if self.in_order else found


class Up(nn.ConvTranspose2d):
    """A transposed convolution that doubles the side."""

    as_products = False
    in_order = False

    def __init__(self, channels: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__(channels, outputs, 4, 2, 1, bias=bias)

    def forward(self, images: Tensor, output_size: list[int] | None = None) -> Tensor:
        if not self.as_products:
            return super().forward(images)
        found = AllAtOnce.apply(_double_stacked, images, self.weight, self.bias)
        return found.contiguous() if self.in_order else found


def compute_as_products(network: nn.Module, wanted: bool = True) -> None:
    """Have all layers of a network that can be computed as matrix products in a stack, or not."""
    # under vmap norms know no other layout
    in_order = any(isinstance(layer, nn.GroupNorm | nn.BatchNorm2d) for layer in network.modules())
    for layer in network.modules():
        if isinstance(layer, Down | Up):
            layer.as_products, layer.in_order = wanted, in_order
