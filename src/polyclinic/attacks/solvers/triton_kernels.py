"""Passes over memory that gradient inversion takes most often, on a GPU. Whoever imports this file needs Triton.

Names in capitals are known when a program is compiled.
"""
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

#: numbers that a program works on
BLOCK = 1024


@triton.jit
def _times(numbers, scale, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < width
    value = tl.load(numbers + row * width + place, mask=inside, other=0.0).to(tl.float32) * tl.load(scale + row)
    tl.store(out + row * width + place, value.to(out.dtype.element_ty), mask=inside)


def times(numbers: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """[N, ...] times scale [N] into `out`, which may be of another type, or `numbers` itself; all contiguous."""
    width = numbers[0].numel()
    _times[(len(numbers), triton.cdiv(width, BLOCK))](numbers, scale, out, width, BLOCK)
    return out


@triton.jit
def _columns(
    images, scale, out, high, wide, channels,
    OUT_WIDE: tl.constexpr, PIXELS: tl.constexpr, KERNEL_HIGH: tl.constexpr, KERNEL_WIDE: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, ABOVE: tl.constexpr, LEFT: tl.constexpr, TURNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program for each channel of an image and each place of the kernel."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    i, j = row // KERNEL_WIDE % KERNEL_HIGH, row % KERNEL_WIDE
    if TURNED:
        i, j = KERNEL_HIGH - 1 - i, KERNEL_WIDE - 1 - j
    picture = row // (KERNEL_HIGH * KERNEL_WIDE)
    y, x = place // OUT_WIDE * DOWN + i - ABOVE, place % OUT_WIDE * ACROSS + j - LEFT
    inside = (y >= 0) & (y < high) & (x >= 0) & (x < wide) & (place < PIXELS)
    value = tl.load(images + picture * high * wide + y * wide + x, mask=inside, other=0.0)
    value = value * tl.load(scale + picture // channels)
    tl.store(out + row * PIXELS + place, value.to(tl.float16), mask=place < PIXELS)


def columns(
    images: Tensor,
    scale: Tensor,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    *,
    turned: bool = False,
) -> Tensor:
    """What each output pixel of a convolution sees, of float32 images [N, C, H, W], contiguous, times scale [N]:
    float16 [N, C·k·k, H'·W']. `turned`: what a kernel sees that is turned by half a circle."""
    count, channels, *sides = images.shape
    high, wide = ((sides[i] + 2 * padding[i] - kernel[i]) // stride[i] + 1 for i in (0, 1))
    rows, pixels = channels * kernel[0] * kernel[1], high * wide
    out = torch.empty(count, rows, pixels, dtype=torch.float16, device=images.device)
    grid = (count * rows, triton.cdiv(pixels, BLOCK))
    _columns[grid](
        images, scale, out, *sides, channels, wide, pixels, *kernel, *stride, *padding, turned, BLOCK
    )  # fmt: skip
    return out


@triton.jit
def _combined(constant, f, x, g, y, h, z, out, channels, pixels, TERMS: tl.constexpr, BLOCK: tl.constexpr):
    """A program for a part of a channel of an image."""
    row = tl.program_id(0).to(tl.int64)
    channel, place = row % channels, tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, at = place < pixels, row * pixels + place
    total = tl.load(constant + channel) + tl.load(f + channel) * tl.load(x + at, mask=inside)
    if TERMS > 1:
        total += tl.load(g + channel) * tl.load(y + at, mask=inside)
    if TERMS > 2:
        total += tl.load(h + channel) * tl.load(z + at, mask=inside)
    tl.store(out + at, total, mask=inside)


def combined(constant: Tensor, terms: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """constant [C] + factor [C] · images [B, C, H, W] + ..., of one to three terms; float32 and contiguous."""
    images = terms[0][1]
    out = torch.empty_like(images)
    given = [tensor for factor, one in terms for tensor in (factor.contiguous(), one)]
    given += given[:2] * (3 - len(terms))  # not read
    batch, channels, high, wide = images.shape
    grid = (batch * channels, triton.cdiv(high * wide, BLOCK))
    _combined[grid](constant.contiguous(), *given, out, channels, high * wide, len(terms), BLOCK)
    return out


@triton.jit
def _difference(a, b, out, sums, width, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * (BLOCK * STEPS) + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(STEPS):
        place = begin + step * BLOCK
        inside, at = place < width, row * width + place
        value = tl.load(a + at, mask=inside, other=0.0) - tl.load(b + at, mask=inside, other=0.0)
        tl.store(out + at, value, mask=inside)
        total += value * value
    tl.store(sums + row * tl.num_programs(1) + tl.program_id(1), tl.sum(total, 0))


def difference(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a - b, both [N, n] in float32 and contiguous, and its sum of squares [N]; always added up in the same order."""
    steps, (count, width) = 8, a.shape
    parts = triton.cdiv(width, BLOCK * steps)
    out, sums = torch.empty_like(a), torch.empty(count, parts, device=a.device)
    _difference[(count, parts)](a, b, out, sums, width, BLOCK, steps)
    return out, sums.sum(1)


def are_right(device: torch.device) -> bool:
    """Whether the four passes give what torch gives, for a few numbers."""
    images = torch.arange(2 * 3 * 5 * 7, dtype=torch.float32, device=device).view(2, 3, 5, 7)
    scale, channels = torch.tensor([0.5, 2.0], device=device), torch.arange(1.0, 4, device=device)
    wanted = images * scale[:, None, None, None]
    twice = times(times(images, scale, torch.empty_like(images, dtype=torch.float16)), scale, torch.empty_like(images))
    seen = columns(images, scale, (3, 3), (1, 1), (1, 1)).float()
    sums = combined(channels, [(channels, images), (scale[:1].expand(3), wanted)])
    by_torch = channels[:, None, None] * (1 + images) + scale[0] * wanted
    apart, squares = difference(images.flatten(1), wanted.flatten(1))
    return (
        torch.equal(twice, wanted * scale[:, None, None, None])
        and torch.equal(seen, F.unfold(wanted, 3, padding=1))
        and torch.allclose(sums, by_torch)
        and torch.equal(apart, (images - wanted).flatten(1))
        and torch.allclose(squares, apart.square().sum(1))
    )
