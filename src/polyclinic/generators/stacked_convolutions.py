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
Way = Literal["vmap", "products", "grouped", "each"]

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
    return _Physical.apply(images, weight, bias, _each_down if way == "each" else _grouped_down)


def spread_out(way: Way, images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.conv_transpose2d(images, weight, bias, stride=2, padding=1)` of one network of a stack."""
    return _Physical.apply(images, weight, bias, _each_up if way == "each" else _grouped_up)


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
