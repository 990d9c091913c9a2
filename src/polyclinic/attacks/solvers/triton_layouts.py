"""Passes that scale numbers and lay them out anew at once, on a GPU. Whoever imports this file needs Triton.

Convolutions of float16 want channels last; the rest of an attack has channels first. Names in capitals are known when a
program is compiled.
"""
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyclinic.attacks.solvers.triton_kernels import check_contiguous

#: sides of the tile that a program turns
CHANNELS, PIXELS = 64, 64
#: output channels, and numbers of each, that a program copies
OUTPUTS, NUMBERS = 16, 128


@triton.jit
def _to_last(numbers, scale, out, channels, pixels, CHANNELS: tl.constexpr, PIXELS: tl.constexpr):
    image = tl.program_id(0).to(tl.int64)
    p, c = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS), tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    numbers, out = numbers + image * channels * pixels, out + image * channels * pixels
    inside = (c[:, None] < channels) & (p[None, :] < pixels)
    value = tl.load(numbers + c[:, None] * pixels + p[None, :], mask=inside, other=0.0) * tl.load(scale + image)
    turned = tl.trans(value.to(tl.float16))
    tl.store(out + p[:, None] * channels + c[None, :], turned, mask=(p[:, None] < pixels) & (c[None, :] < channels))


def to_channels_last(images: Tensor, scale: Tensor) -> Tensor:
    """float32 [N, C, H, W], contiguous, times scale [N]: float16 with channels last."""
    check_contiguous(images, scale)
    out = torch.empty(images.shape, dtype=torch.float16, device=images.device, memory_format=torch.channels_last)
    _to_last[_tiles(images)](images, scale, out, *_sizes(images), CHANNELS, PIXELS)
    return out


@triton.jit
def _to_first(
    numbers, scale, plus, undo, out, channels, pixels, PLUS: tl.constexpr, CHANNELS: tl.constexpr, PIXELS: tl.constexpr
):
    image = tl.program_id(0).to(tl.int64)
    p, c = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS), tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    first = image * channels * pixels
    inside = (p[:, None] < pixels) & (c[None, :] < channels)
    value = tl.load(numbers + first + p[:, None] * channels + c[None, :], mask=inside, other=0.0)
    turned = tl.trans(value).to(tl.float32) * tl.load(scale + image)
    at = first + c[:, None] * pixels + p[None, :]
    inside = (c[:, None] < channels) & (p[None, :] < pixels)
    if PLUS:
        turned += tl.load(plus + at, mask=inside, other=0.0) * tl.load(undo + image)
    tl.store(out + at, turned, mask=inside)


def to_channels_first(images: Tensor, scale: Tensor, plus: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """float16 [N, C, H, W] with channels last times scale [N]: float32 with channels first. `plus`: float32 images with
    channels first, contiguous, and their scale [N], to be added."""
    out = torch.empty(images.shape, dtype=torch.float32, device=images.device)
    added = (out, scale) if plus is None else plus
    check_contiguous(scale, *added)
    _to_first[_tiles(images)](
        images, scale, *added, out, *_sizes(images), plus is not None, CHANNELS, PIXELS
    )  # fmt: skip
    return out


def _sizes(images: Tensor) -> tuple[int, int]:
    return images.shape[1], images.shape[2] * images.shape[3]


def _tiles(images: Tensor) -> tuple[int, int, int]:
    channels, pixels = _sizes(images)
    return len(images), triton.cdiv(pixels, PIXELS), triton.cdiv(channels, CHANNELS)


@triton.jit
def _both(
    weights, scale, out, across, outputs, width, PLACES: tl.constexpr, OUTPUTS: tl.constexpr, NUMBERS: tl.constexpr
):
    """A program for some outputs and some of their numbers, (channel, place of the kernel) in one count."""
    target = tl.program_id(0).to(tl.int64)
    o, j = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(2) * NUMBERS + tl.arange(0, NUMBERS)
    first = target * outputs * width
    inside = (o[:, None] < outputs) & (j[None, :] < width)
    at = o[:, None] * width + j[None, :]
    value = (tl.load(weights + first + at, mask=inside, other=0.0) * tl.load(scale + target)).to(tl.float16)
    tl.store(out + first + at, value, mask=inside)
    turned = (j[None, :] // PLACES) * (outputs * PLACES) + o[:, None] * PLACES + j[None, :] % PLACES
    tl.store(across + first + turned, value, mask=inside)


def both_layouts(weights: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """float32 weights [N, O, C, k, k], contiguous, times scale [N], in float16: [N, O, C·k·k] and [N, C, O·k·k]."""
    check_contiguous(weights, scale)
    count, outputs, channels, *kernel = weights.shape
    places = kernel[0] * kernel[1]
    width = channels * places
    out = torch.empty(count, outputs, width, dtype=torch.float16, device=weights.device)
    across = torch.empty(count, channels, outputs * places, dtype=torch.float16, device=weights.device)
    grid = (count, triton.cdiv(outputs, OUTPUTS), triton.cdiv(width, NUMBERS))
    _both[grid](weights, scale, out, across, outputs, width, places, OUTPUTS, NUMBERS)
    return out, across


def are_right(device: torch.device) -> bool:
    """Whether the three passes give what torch gives, for a few numbers."""
    images = torch.arange(2.0 * 8 * 5 * 7, device=device).view(2, 8, 5, 7)
    scale = torch.tensor([0.5, 2.0], device=device)
    wanted = images * scale[:, None, None, None]
    last = to_channels_last(images, scale)
    first = to_channels_first(last, 1 / scale)
    sums = to_channels_first(last, 1 / scale, (images, scale))
    along, across = both_layouts(images.view(2, 4, 2, 5, 7), scale)
    turned = wanted.half().view(2, 4, 2, 5, 7).transpose(1, 2).flatten(2)
    return (
        last.is_contiguous(memory_format=torch.channels_last)
        and torch.equal(last, wanted.half())
        and torch.equal(first, wanted.half() / scale[:, None, None, None])
        and torch.allclose(sums, first + wanted)
        and torch.equal(along, wanted.half().view(2, 4, -1))
        and torch.equal(across, turned)
    )
