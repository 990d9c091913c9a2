"""Convolutions by weights that all targets share, with 11 significant bits in 16 bits; see `half_products`."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from polyclinic.attacks.solvers.columns import Window
from polyclinic.attacks.solvers.half_products import (
    LARGEST,
    Factor,
    by_row,
    is_fused,
    scaled,
    times_rows,
    undo_of,
)

#: the largest sum of a convolution, whose outputs are float16 as well
LARGEST_OUTPUT = 2.0**15


class ToAdd(NamedTuple):
    """Images [N, O, H', W'] that are to be multiplied by `undo` [N]; both contiguous."""

    values: Tensor
    undo: Tensor


def kernel_of(weight: Tensor) -> Factor:
    """Weights [O, C, k, k] in float16, none larger than 1, with one `undo` [1]."""
    given = weight[None].contiguous()
    undo = undo_of(given, 1.0)
    if has_channels_last(given, weight.shape):
        from polyclinic.attacks.solvers import triton_layouts

        by = (1 / undo).expand(len(weight)).contiguous()
        return Factor(triton_layouts.to_channels_last(given[0], by), undo)
    return Factor(scaled(given, undo).values[0], undo)


def has_channels_last(images: Tensor, kernel: torch.Size) -> bool:
    """Whether a convolution gets channels last. With float16 a GPU is faster so, if both numbers of channels can be
    divided by eight."""
    return is_fused(images) and kernel[0] % 8 == 0 and kernel[1] % 8 == 0


def convolve(images: Tensor, undo: Tensor, kernel: Factor, window: Window, plus: ToAdd | None = None) -> Tensor:
    """Images [N, C, H, W], whose scale `undo` [N] undoes, to [N, O, H', W']; `plus` is added to it."""
    small, undo = _operand(images, undo, kernel, kernel.values[0].numel())
    return _undone(F.conv2d(small, kernel.values, None, window.stride, window.padding), undo, plus)


def transpose(outputs: Tensor, undo: Tensor, kernel: Factor, window: Window, size: torch.Size) -> Tensor:
    """The transpose of `convolve`: [N, O, H', W'] to [N, C, *size]."""
    small, undo = _operand(outputs, undo, kernel, kernel.values[:, 0].numel())
    extra = window.extra(outputs.shape[-2:], size)
    return _undone(F.conv_transpose2d(small, kernel.values, None, window.stride, window.padding, extra), undo)


def _operand(images: Tensor, undo: Tensor, kernel: Factor, terms: int) -> tuple[Tensor, Tensor]:
    """Images in float16, so small that a sum of `terms` products has room, and what undoes the scale of such a sum."""
    room = LARGEST_OUTPUT / LARGEST / 2.0 ** math.ceil(math.log2(terms))
    assert kernel.undo is not None
    of_images = undo / room
    if has_channels_last(images, kernel.values.shape):
        from polyclinic.attacks.solvers import triton_layouts

        return triton_layouts.to_channels_last(images, 1 / of_images), of_images * kernel.undo
    return scaled(images, of_images).values, of_images * kernel.undo


def _undone(small: Tensor, undo: Tensor, plus: ToAdd | None = None) -> Tensor:
    """The output of a convolution in float32."""
    if small.is_cuda and small.is_contiguous(memory_format=torch.channels_last) and not small.is_contiguous():
        from polyclinic.attacks.solvers import triton_layouts

        return triton_layouts.to_channels_first(small, undo, plus)
    found = times_rows(small, undo, torch.empty(small.shape, dtype=torch.float32, device=small.device))
    return found if plus is None else found.addcmul_(plus.values, by_row(plus.undo, found))
