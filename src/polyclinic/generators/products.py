"""Convolutions of 4x4 pixels with stride 2, and their transposes, as matrix products.

On a GPU the convolutions of many stacked networks become grouped ones, for which there are no fast kernels when groups
are small; a batch of matrix products has them. Such a convolution is one of 2x2 pixels with stride 1 on an image whose
2x2 blocks lie in its channels. Products are of rows [N, channels] and a matrix: under `torch.func.vmap` one product for
each network, and none of its weights is copied for every image.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.generators import stacked_convolutions
from polyclinic.generators.stacked_convolutions import Way

VIEWS = [(i, j) for i in (0, 1) for j in (0, 1)]  # the four shifts by a block: down, right


def convolve(images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.conv2d(images, weight, bias, stride=2, padding=1)`, for weights [O, C, 4, 4] and even sides."""
    outputs, channels = weight.shape[:2]
    blocks = _blocks(F.pad(images, (1, 1, 1, 1)))
    rows, columns = blocks.shape[1] - 1, blocks.shape[2] - 1
    shifted = [(slice(i, i + rows), slice(j, j + columns)) for i, j in VIEWS]
    if outputs <= 4 * channels:  # the fewer numbers are moved: products of all blocks are, then added up shifted
        products = (blocks.flatten(0, 2) @ _kernel(weight, "first")).reshape(*blocks.shape[:3], 4, outputs)
        parts = [products[:, down, right, view] for view, (down, right) in enumerate(shifted)]
        found = (parts[0] + parts[1]) + (parts[2] + parts[3])
    else:
        patches = torch.cat([blocks[:, down, right] for down, right in shifted], -1)  # [B, H, W, 4 (4 C)]
        found = (patches.flatten(0, 2) @ _kernel(weight, "last")).reshape(len(images), rows, columns, outputs)
    if bias is not None:
        found = found + bias.to(found.dtype)
    return found.permute(0, 3, 1, 2)


def spread_out(images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.conv_transpose2d(images, weight, bias, stride=2, padding=1)`, for weights [C, O, 4, 4]."""
    count, channels, rows, columns = images.shape
    outputs = weight.shape[1]
    products = images.permute(0, 2, 3, 1).reshape(-1, channels) @ _spreading_kernel(weight)
    views = products.reshape(count, rows, columns, 4, 4 * outputs).unbind(3)
    blocks = sum(F.pad(view, (0, 0, j, 1 - j, i, 1 - i)) for view, (i, j) in zip(views, VIEWS, strict=True))
    assert isinstance(blocks, Tensor)
    found = _unblocked(blocks, outputs)[:, :, 1:-1, 1:-1]
    return found if bias is None else found + bias.to(found.dtype)[:, None, None]


def _blocks(images: Tensor) -> Tensor:
    """[B, C, 2 H, 2 W] to [B, H, W, 4 C]: channel (r, s, c) has the pixels of row r and column s of each block."""
    count, channels, rows, columns = images.shape
    split = images.reshape(count, channels, rows // 2, 2, columns // 2, 2)
    return split.permute(0, 2, 4, 3, 5, 1).reshape(count, rows // 2, columns // 2, 4 * channels)


def _unblocked(blocks: Tensor, channels: int) -> Tensor:
    """What `_blocks` was given."""
    count, rows, columns, _ = blocks.shape
    split = blocks.reshape(count, rows, columns, 2, 2, channels)
    return split.permute(0, 5, 1, 3, 2, 4).reshape(count, channels, 2 * rows, 2 * columns)


def _kernel(weight: Tensor, views: Literal["first", "last"]) -> Tensor:
    """[O, C, 4, 4] as a matrix: of a block [4 C] to its four products [4 O], or of a patch [4 (4 C)] to [O]."""
    outputs, channels = weight.shape[:2]
    split = weight.reshape(outputs, channels, 2, 2, 2, 2)  # rows: view, in block; columns: view, in block
    if views == "first":
        return split.permute(3, 5, 1, 2, 4, 0).reshape(4 * channels, 4 * outputs)
    return split.permute(2, 4, 3, 5, 1, 0).reshape(16 * channels, outputs)


def _spreading_kernel(weight: Tensor) -> Tensor:
    """[C, O, 4, 4] as a matrix of a pixel [C] to its part in four blocks [4 (4 O)]."""
    channels, outputs = weight.shape[:2]
    return weight.reshape(channels, outputs, 2, 2, 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(channels, 16 * outputs)


class Down(nn.Conv2d):
    """A convolution that halves the side; `way` says how it is computed in a stack of networks, not what."""

    way: Way = "vmap"
    in_order = False  # whether what it gives must lie channel by channel in memory

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__(channels, outputs, 4, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.apply_weight(images, self.weight)

    def apply_weight(self, images: Tensor, weight: Tensor) -> Tensor:
        if self.way == "vmap":
            return F.conv2d(images, weight, self.bias, self.stride, self.padding)
        if self.way == "products":
            found = convolve(images, weight, self.bias)
        else:
            found = stacked_convolutions.convolve(self.way, images, weight, self.bias)
        return found.contiguous() if self.in_order else found


class Up(nn.ConvTranspose2d):
    """A transposed convolution that doubles the side."""

    way: Way = "vmap"
    in_order = False  # whether what it gives must lie channel by channel in memory

    def __init__(self, channels: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__(channels, outputs, 4, 2, 1, bias=bias)

    def forward(self, images: Tensor, output_size: list[int] | None = None) -> Tensor:
        if self.way == "vmap":
            return super().forward(images)
        if self.way == "products":
            found = spread_out(images, self.weight, self.bias)
        else:
            found = stacked_convolutions.spread_out(self.way, images, self.weight, self.bias)
        return found.contiguous() if self.in_order else found


THIN = 8  # channels of pixels, below which a layer is computed in a way of its own


def compute(network: nn.Module, way: Way, thin: Way | None = None) -> None:
    """Have all layers of a network whose stack can be computed in several ways be computed in this one; those that take
    or give pixels in another, if wanted."""
    # under vmap norms know no other layout
    in_order = any(isinstance(layer, nn.GroupNorm | nn.BatchNorm2d) for layer in network.modules())
    for layer in network.modules():
        if isinstance(layer, Down | Up):
            pixels = layer.in_channels if isinstance(layer, Down) else layer.out_channels
            layer.way = thin or way if pixels < THIN else way
            layer.in_order = in_order
