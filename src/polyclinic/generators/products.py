"""Convolutions of 4x4 pixels with stride 2, and their transposes, as matrix products.

On a GPU the convolutions of many stacked networks become grouped ones, for which there are no fast kernels when groups
are small; a batch of matrix products has them. Such a convolution is one of 2x2 pixels with stride 1 on an image whose
2x2 blocks lie in its channels: four shifted views side by side, and one product.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def convolve(images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.conv2d(images, weight, bias, stride=2, padding=1)`, for weights [O, C, 4, 4] and even sides."""
    blocks = _blocks(F.pad(images, (1, 1, 1, 1)))
    rows, columns = blocks.shape[-2] - 1, blocks.shape[-1] - 1
    views = [blocks[:, :, i : i + rows, j : j + columns] for i in (0, 1) for j in (0, 1)]
    patches = torch.cat(views, 1).flatten(2).transpose(1, 2)  # [B, H W, 4 (4 C)]
    found = patches @ _kernel(weight).T
    if bias is not None:
        found = found + bias.to(found.dtype)
    # group norm under vmap knows no other layout
    return found.transpose(1, 2).reshape(len(images), len(weight), rows, columns).contiguous()


def spread_out(images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.conv_transpose2d(images, weight, bias, stride=2, padding=1)`, for weights [C, O, 4, 4]."""
    count, _, rows, columns = images.shape
    outputs = weight.shape[1]
    patches = images.flatten(2).transpose(1, 2) @ _kernel(weight)  # [B, H W, 4 (4 O)]
    views = patches.transpose(1, 2).reshape(count, 4, 4 * outputs, rows, columns).unbind(1)
    places = [(i, j) for i in (0, 1) for j in (0, 1)]
    blocks = sum(F.pad(view, (j, 1 - j, i, 1 - i)) for view, (i, j) in zip(views, places, strict=True))
    assert isinstance(blocks, Tensor)
    found = _unblocked(blocks, outputs)[:, :, 1:-1, 1:-1]
    return found if bias is None else found + bias.to(found.dtype)[:, None, None]


def _blocks(images: Tensor) -> Tensor:
    """[B, C, 2 H, 2 W] to [B, 4 C, H, W]: channel (r, s, c) has the pixels of row r and column s of each block."""
    count, channels, rows, columns = images.shape
    split = images.reshape(count, channels, rows // 2, 2, columns // 2, 2)
    return split.permute(0, 3, 5, 1, 2, 4).reshape(count, 4 * channels, rows // 2, columns // 2)


def _unblocked(blocks: Tensor, channels: int) -> Tensor:
    """What `_blocks` was given."""
    count, _, rows, columns = blocks.shape
    split = blocks.reshape(count, 2, 2, channels, rows, columns)
    return split.permute(0, 3, 4, 1, 5, 2).reshape(count, channels, 2 * rows, 2 * columns)


def _kernel(weight: Tensor) -> Tensor:
    """[O, C, 4, 4] to [O, 4 (4 C)], in the order of the views and of the blocks' channels."""
    outputs, channels = weight.shape[:2]
    split = weight.reshape(outputs, channels, 2, 2, 2, 2)  # rows: view, in block; columns: view, in block
    return split.permute(0, 2, 4, 3, 5, 1).reshape(outputs, -1)


class Down(nn.Conv2d):
    """A convolution that halves the side; `as_products` says how it is computed, not what."""

    as_products = False

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__(channels, outputs, 4, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.apply_weight(images, self.weight)

    def apply_weight(self, images: Tensor, weight: Tensor) -> Tensor:
        if self.as_products:
            return convolve(images, weight, self.bias)
        return F.conv2d(images, weight, self.bias, self.stride, self.padding)


class Up(nn.ConvTranspose2d):
    """A transposed convolution that doubles the side."""

    as_products = False

    def __init__(self, channels: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__(channels, outputs, 4, 2, 1, bias=bias)

    def forward(self, images: Tensor, output_size: list[int] | None = None) -> Tensor:
        if self.as_products:
            return spread_out(images, self.weight, self.bias)
        return super().forward(images)


def compute_as_products(network: nn.Module, wanted: bool = True) -> None:
    """Have all layers of a network that can compute as matrix products, or not."""
    for layer in network.modules():
        if isinstance(layer, Down | Up):
            layer.as_products = wanted
