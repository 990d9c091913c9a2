"""Convolutions of 4x4 pixels with stride 2, and their transposes, of many stacked networks at once.

`torch.func.vmap` makes one grouped convolution of them, in a layout for which a GPU has slow kernels only. Here the
stack is computed with its channels last, as one grouped convolution ("grouped") or network by network ("each").
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

#: how a layer of a stack is computed: as `vmap` does, as matrix products (`products.py`), or as here
Way = Literal["vmap", "products", "patches", "grouped", "each"]

ALIGNED = 8  # channels of a group that tensor cores take together


class _Physical(torch.autograd.Function):
    """Under `vmap`: `compute(images [M, B, C, H, W], weight [M, ...], bias [M, O] or None)`, with its own gradients."""

    @staticmethod
    def forward(images: Tensor, weight: Tensor, bias: Tensor | None, compute: Any) -> Tensor:
        raise RuntimeError("a layer of stacked networks is computed for all of them at once, under vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple, images: Tensor, weight: Tensor, bias: Tensor | None, compute: Any) -> Any:
        images, weight = (
            x.movedim(d, 0) if d is not None else x.expand(info.batch_size, *x.shape)
            for x, d in ((images, in_dims[0]), (weight, in_dims[1]))
        )
        if bias is not None:
            bias = bias.movedim(in_dims[2], 0) if in_dims[2] is not None else bias.expand(info.batch_size, -1)
        if torch.is_autocast_enabled(images.device.type):  # before anything is moved in memory
            images, weight = (x.to(torch.get_autocast_dtype(x.device.type)) for x in (images, weight))
        return compute(images, weight, bias), 0


def convolve(way: Way, images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.conv2d(images, weight, bias, stride=2, padding=1)` of one network of a stack."""
    return _Physical.apply(images, weight, bias, DOWN[way])


def spread_out(way: Way, images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.conv_transpose2d(images, weight, bias, stride=2, padding=1)` of one network of a stack."""
    return _Physical.apply(images, weight, bias, UP[way])


# --- one grouped convolution --------------------------------------------------------------------------


def _grouped_down(images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    missing = -weight.shape[2] % ALIGNED if weight.shape[2] < ALIGNED else 0
    if missing:
        images, weight = F.pad(images, (0, 0, 0, 0, 0, missing)), F.pad(weight, (0, 0, 0, 0, 0, missing))
    many = len(images)
    flat = None if bias is None else bias.flatten()
    found = F.conv2d(_side_by_side(images), _last(weight.flatten(0, 1)), flat, 2, 1, groups=many)
    return found.unflatten(1, (many, -1)).transpose(0, 1)


def _grouped_up(images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    outputs, many = weight.shape[2], len(images)
    if outputs < ALIGNED:
        weight = F.pad(weight, (0, 0, 0, 0, 0, ALIGNED - outputs))
    found = F.conv_transpose2d(_side_by_side(images), _last(weight.flatten(0, 1)), None, 2, 1, groups=many)
    found = found.unflatten(1, (many, -1))[:, :, :outputs].transpose(0, 1)
    return found if bias is None else found + bias.to(found.dtype)[:, None, :, None, None]


def _side_by_side(images: Tensor) -> Tensor:
    """[M, B, C, H, W] as [B, M C, H, W], channels last in memory; no copy if a layer before has made them so."""
    return _last(images.transpose(0, 1).flatten(1, 2))


def _last(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last)


# --- network by network -------------------------------------------------------------------------------


def _each_down(images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    each = zip(_one_by_one(images), _one_by_one(weight), strict=True)
    return _stacked([F.conv2d(one, kernel, None, 2, 1) for one, kernel in each], bias)


def _each_up(images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    each = zip(_one_by_one(images), _one_by_one(weight), strict=True)
    return _stacked([F.conv_transpose2d(one, kernel, None, 2, 1) for one, kernel in each], bias)


def _one_by_one(stack: Tensor) -> tuple[Tensor, ...]:
    """Each network's images or weights, channels last in memory; one copy for all, or none."""
    return stack.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3).unbind(0)


def _stacked(found: list[Tensor], bias: Tensor | None) -> Tensor:
    stack = torch.stack([one.permute(0, 2, 3, 1) for one in found])  # [M, B, H, W, C]
    if bias is not None:
        stack = stack + bias.to(stack.dtype)[:, None, None, None]
    return stack.permute(0, 1, 4, 2, 3)


# --- products of patches ------------------------------------------------------------------------------


def _patches_down(images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    many, count, _, rows, columns = images.shape
    kernel = weight.permute(0, 3, 4, 2, 1).reshape(many, -1, weight.shape[1])
    found = torch.bmm(_Patches.apply(images), kernel)
    if bias is not None:
        found = found + bias.to(found.dtype)[:, None]
    return found.reshape(many, count, rows // 2, columns // 2, -1).permute(0, 1, 4, 2, 3)


def _patches_up(images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    many, count, channels, rows, columns = images.shape
    kernel = weight.permute(0, 1, 3, 4, 2).reshape(many, channels, -1)
    products = torch.bmm(images.permute(0, 1, 3, 4, 2).reshape(many, -1, channels), kernel)
    found = _Overlaid.apply(products, (count, 2 * rows, 2 * columns))
    return found if bias is None else found + bias.to(found.dtype)[:, None, :, None, None]


class _Patches(torch.autograd.Function):
    """Images [M, B, C, H, W] to the 4x4 pixels that each output of a convolution sees, [M, B H/2 W/2, 16 C]; around an
    image there are zeros. Its slope lays patches over each other; autograd's own would do so view by view."""

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
    def backward(ctx: Any, slope: Tensor) -> Tensor:  # type: ignore[override]
        return _Overlaid.apply(slope, ctx.shape)


class _Overlaid(torch.autograd.Function):
    """Patches [M, B H/2 W/2, 16 C] added up where they overlap, to images [M, B, C, H, W]: the slope of `_Patches`,
    which in turn is its own."""

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
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _Patches.apply(slope), None


DOWN = {"patches": _patches_down, "grouped": _grouped_down, "each": _each_down}
UP = {"patches": _patches_up, "grouped": _grouped_up, "each": _each_up}
