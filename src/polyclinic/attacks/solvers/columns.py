"""What each output pixel of a convolution sees, as columns of a matrix: then a convolution is a matrix product."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from polyclinic.attacks.solvers.half_products import Factor, factor, in_half, is_fused, product, undo_of

#: the largest kernel, in places, for which Triton finds the columns: its program has a line for each place
MOST_PLACES = 64


class Window(NamedTuple):
    """Kernel, stride and padding of a convolution, each down and across."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    def extra(self, given: torch.Size, size: torch.Size) -> tuple[int, int]:
        """Rows and columns of images of `size` that no output of a convolution, which has size `given`, sees."""
        kernel, stride, padding = self
        high, wide = (size[i] - ((given[i] - 1) * stride[i] - 2 * padding[i] + kernel[i]) for i in (0, 1))
        return high, wide


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
    """`seen_by_outputs` as a factor of a product; `turned`: what a kernel sees that is rotated by 180°. `undo`: of
    these images as a factor, where it is known."""
    few = window.kernel[0] * window.kernel[1] <= MOST_PLACES
    if few and in_half(images) and images.shape[1] == 1 and is_fused(images):
        from polyclinic.attacks.solvers import triton_kernels

        undo = undo_of(images) if undo is None else undo
        return Factor(triton_kernels.columns(images[:, 0], 1 / undo, *window, turned=turned), undo)
    small = factor(images, undo)  # rounded before it is spread, as it then is larger by k·k
    if not turned:
        return Factor(seen_by_outputs(small.values, window), small.undo)
    seen = seen_by_outputs(small.values, window).unflatten(1, (-1, *window.kernel))
    return Factor(seen.flip(2, 3).flatten(1, 3), small.undo)


def convolve_back(
    gradient: Tensor, along: Factor, across: Factor, window: Window, shape: torch.Size, undo: Tensor | None = None
) -> Tensor:
    """The gradient of images, `shape`, that N targets convolve with weights of their own, in `both_layouts`. `undo`: of
    the gradient as a factor, where it is known.

    Without strides it is a convolution as well, by a kernel rotated by 180°: what that sees is found thrice as fast on
    a GPU as columns are added up.
    """
    around = (window.kernel[0] - 1 - window.padding[0], window.kernel[1] - 1 - window.padding[1])
    if window.stride == (1, 1) and min(around) >= 0:
        columns = columns_of(gradient, Window(window.kernel, (1, 1), around), turned=True, undo=undo)
        return by_image(product(across, columns), shape)
    back = product(Factor(along.values.mT, along.undo), factor(by_channel(gradient), undo))
    seen = back.unflatten(2, (shape[1], -1)).transpose(1, 2).reshape(1, -1, back.shape[2] // shape[1])
    return F.fold(seen, shape[-2:], window.kernel, 1, window.padding, window.stride).view(shape)


def vmapped_first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """The tensor with the dimension that `vmap` added in front."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def joined(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """[N, ...], of which `vmap` added `size`, as [size · N, ...]."""
    return vmapped_first(tensor, dim, size).flatten(0, 1)
