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

#: numbers that a program works on at once, and how many times it does so for long rows: CUDA allows 65,535 programs for
#: each row
BLOCK, STEPS = 1024, 8


def check_contiguous(*tensors: Tensor) -> None:
    """A kernel gets the address of the first number and knows nothing of strides."""
    if not all(one.is_contiguous() for one in tensors):
        raise ValueError("a kernel needs contiguous tensors")


@triton.jit
def _times(numbers, scale, out, width, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * (BLOCK * STEPS) + tl.arange(0, BLOCK)
    factor = tl.load(scale + row)
    for step in range(STEPS):
        place = begin + step * BLOCK
        inside = place < width
        if IN_PLACE:
            inside = inside & (factor != 1.0)  # a row times 1 is not even read
        value = tl.load(numbers + row * width + place, mask=inside, other=0.0).to(tl.float32) * factor
        tl.store(out + row * width + place, value.to(out.dtype.element_ty), mask=inside)


def times(numbers: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """[N, ...] times scale [N] into `out`, which may be of another type, or `numbers` itself; all contiguous."""
    check_contiguous(numbers, scale, out)
    width, in_place = numbers[0].numel(), numbers is out
    grid = (len(numbers), triton.cdiv(width, BLOCK * STEPS))
    _times[grid](numbers, scale, out, width, in_place, BLOCK, STEPS)
    if in_place:  # autograd then refuses to use the tensor as it was before
        torch.autograd.graph.increment_version(out)
    return out


@triton.jit
def _largest(numbers, out, width, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * (BLOCK * STEPS) + tl.arange(0, BLOCK)
    most = tl.zeros((BLOCK,), tl.float32)
    for step in range(STEPS):
        place = begin + step * BLOCK
        value = tl.load(numbers + row * width + place, mask=place < width, other=0.0)
        most = tl.maximum(most, tl.abs(value))
    tl.store(out + row * tl.num_programs(1) + tl.program_id(1), tl.max(most, 0))


@triton.jit
def _undo_of(parts, undo, count, limit, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    most = tl.max(tl.load(parts + row * count + place, mask=place < count, other=0.0), 0)
    ratio = limit / tl.maximum(most, 1e-30)
    power = (ratio.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)  # its exponent alone
    tl.store(undo + row, 1.0 / power)


def undo_of(numbers: Tensor, limit: float) -> Tensor:
    """1 divided by the largest power of two [N] by which each row of [N, ...], float32 and contiguous, stays within
    `limit`."""
    check_contiguous(numbers)
    count, width = len(numbers), numbers[0].numel()
    parts = triton.cdiv(width, BLOCK * STEPS)
    largest = torch.empty(count, parts, dtype=torch.float32, device=numbers.device)
    _largest[(count, parts)](numbers, largest, width, BLOCK, STEPS)
    undo = torch.empty(count, dtype=torch.float32, device=numbers.device)
    _undo_of[(count,)](largest, undo, parts, limit, triton.next_power_of_2(parts))
    return undo


@triton.jit
def _columns(
    images, scale, out, channels, HIGH: tl.constexpr, WIDE: tl.constexpr,
    OUT_WIDE: tl.constexpr, PIXELS: tl.constexpr, KERNEL_HIGH: tl.constexpr, KERNEL_WIDE: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, ABOVE: tl.constexpr, LEFT: tl.constexpr, TURNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program for a channel of an image, which stays near while all places of the kernel look at it. The places are
    known when it is compiled: else counting pixels would take longer than moving them."""
    picture = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    images, out = images + picture * (HIGH * WIDE), out + picture * (KERNEL_HIGH * KERNEL_WIDE * PIXELS)
    factor = tl.load(scale + picture // channels)
    top, left = place // OUT_WIDE * DOWN - ABOVE, place % OUT_WIDE * ACROSS - LEFT
    corner = images + top * WIDE + left
    for i in tl.static_range(KERNEL_HIGH):
        down = (top >= -i) & (top < HIGH - i) & (place < PIXELS)
        for j in tl.static_range(KERNEL_WIDE):
            inside = down & (left >= -j) & (left < WIDE - j)
            value = tl.load(corner + (i * WIDE + j), mask=inside, other=0.0) * factor
            row = i * KERNEL_WIDE + j
            if TURNED:
                row = KERNEL_HIGH * KERNEL_WIDE - 1 - row
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
    float16 [N, C·k·k, H'·W']. `turned`: what a kernel sees that is rotated by 180°."""
    check_contiguous(images, scale)
    count, channels, *sides = images.shape
    high, wide = ((sides[i] + 2 * padding[i] - kernel[i]) // stride[i] + 1 for i in (0, 1))
    rows, pixels = channels * kernel[0] * kernel[1], high * wide
    out = torch.empty(count, rows, pixels, dtype=torch.float16, device=images.device)
    block = min(BLOCK, max(32, triton.next_power_of_2(pixels)))
    grid, warps = (count * channels, triton.cdiv(pixels, block)), max(1, block // 128)
    _columns[grid](
        images, scale, out, channels, *sides, wide, pixels, *kernel, *stride, *padding, turned, block, num_warps=warps
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
        tl.store(out + at, 2.0 * value, mask=inside)
        total += value * value
    tl.store(sums + row * tl.num_programs(1) + tl.program_id(1), tl.sum(total, 0))


def difference(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """2 (a - b), both [N, n] in float32 and contiguous, and the sum of squares of a - b [N], which is always added up
    in the same order."""
    check_contiguous(a, b)
    count, width = a.shape
    parts = triton.cdiv(width, BLOCK * STEPS)
    out, sums = torch.empty_like(a), torch.empty(count, parts, dtype=torch.float32, device=a.device)
    _difference[(count, parts)](a, b, out, sums, width, BLOCK, STEPS)
    return out, sums.sum(1)


def are_right(device: torch.device) -> bool:
    """Whether the passes give what torch gives, for a few numbers."""
    images = torch.arange(2 * 3 * 5 * 7, dtype=torch.float32, device=device).view(2, 3, 5, 7)
    scale, channels = torch.tensor([0.5, 2.0], device=device), torch.arange(1.0, 4, device=device)
    wanted = images * scale[:, None, None, None]
    small = times(images, scale, torch.empty_like(images, dtype=torch.float16))
    in_place = images.clone()
    times(in_place, 2 * scale, in_place)  # once by 1
    seen = F.unfold(wanted, (3, 2), 1, (2, 1), (2, 1))
    turned = seen.view(2, 3, 3, 2, -1).flip(2, 3).view_as(seen)
    sums = combined(channels, [(channels, images), (scale[:1].expand(3), wanted)])
    slope, squares = difference(images.flatten(1), wanted.flatten(1))
    window = (3, 2), (2, 1), (2, 1)
    return (
        torch.equal(small.float(), wanted)
        and torch.equal(in_place, 2 * wanted)
        and undo_of(images - 150, 2.0**14).tolist() == [1 / 64, 1 / 256]
        and torch.equal(columns(images, scale, *window).float(), seen)
        and torch.equal(columns(images, scale, *window, turned=True).float(), turned)
        and torch.allclose(sums, channels[:, None, None] * (1 + images) + scale[0] * wanted)
        and torch.equal(slope, 2 * (images - wanted).flatten(1))
        and torch.allclose(squares, (images - wanted).flatten(1).square().sum(1))
    )
