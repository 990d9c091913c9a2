"""The programs of `kernels.py` that run on the GPU. Whoever imports this file needs Triton.

Names in capitals are known when a program is compiled.
"""
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from polyclinic.generators.stylegan2.kernels import FilterPlan, Rule

#: pixels and channels that a program takes at a time, and the most programs that share the pixels of an image
PIXELS, CHANNELS, SLABS = 32, 64, 32
#: columns and rows of an image that a program filters
COLUMNS, ROWS = 16, 16


# --- factors, bias, noise, activation -----------------------------------------------------------------


@triton.jit
def _summed(
    x, factors, bias, noise, c, p, channels, image, pixels,
    FACTORS: tl.constexpr, BIAS: tl.constexpr, NOISE: tl.constexpr,
):  # fmt: skip
    """x · factors + bias + noise of a tile [pixels, channels], in fp32."""
    if FACTORS:
        x = x * tl.load(factors + image * channels + c, mask=c < channels, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        x = x + tl.load(bias + c, mask=c < channels, other=0.0).to(tl.float32)[None, :]
    if NOISE:
        x = x + tl.load(noise + image * pixels + p, mask=p < pixels, other=0.0).to(tl.float32)[:, None]
    return x


@triton.jit
def _finish(
    x, y, factors, bias, noise, pixels, channels, gain, slope,
    FACTORS: tl.constexpr, BIAS: tl.constexpr, NOISE: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(1)
    p = tl.program_id(0) * P + tl.arange(0, P)
    c = tl.program_id(2) * C + tl.arange(0, C)
    inside = (p < pixels)[:, None] & (c < channels)[None, :]
    at = (image.to(tl.int64) * pixels + p)[:, None] * channels + c[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value = _summed(value, factors, bias, noise, c, p, channels, image, pixels, FACTORS, BIAS, NOISE)
    value = tl.where(value > 0, value, value * slope) * gain
    tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _finish_back(
    g, x, of_x, factors, bias, noise, of_factors, of_bias, of_noise, pixels, channels, gain, slope,
    EACH: tl.constexpr,
    FACTORS: tl.constexpr, BIAS: tl.constexpr, NOISE: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """`EACH`: tiles that this program goes through. Sums over its pixels are its own, [slab, channel] for an image;
    the noise's gradient is summed over this program's channels, [channel block, pixel] for an image."""
    slab, image, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    c = block * C + tl.arange(0, C)
    by_factor, by_bias = tl.zeros((P, C), tl.float32), tl.zeros((P, C), tl.float32)
    for tile in range(EACH):
        p = (slab * EACH + tile) * P + tl.arange(0, P)
        inside = (p < pixels)[:, None] & (c < channels)[None, :]
        at = (image.to(tl.int64) * pixels + p)[:, None] * channels + c[None, :]
        given = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        change = tl.load(g + at, mask=inside, other=0.0).to(tl.float32) * gain
        value = _summed(given, factors, bias, noise, c, p, channels, image, pixels, FACTORS, BIAS, NOISE)
        change = tl.where(value > 0, change, change * slope)
        if BIAS:
            by_bias += change
        if NOISE:
            place = (image * tl.num_programs(2) + block).to(tl.int64) * pixels + p
            tl.store(of_noise + place, tl.sum(change, 1), mask=p < pixels)
        if FACTORS:
            by_factor += change * given
            change = change * tl.load(factors + image * channels + c, mask=c < channels, other=0.0).to(tl.float32)[None]
        tl.store(of_x + at, change.to(of_x.dtype.element_ty), mask=inside)
    sums = (image * tl.num_programs(0) + slab) * channels + c
    if FACTORS:
        tl.store(of_factors + sums, tl.sum(by_factor, 0), mask=c < channels)
    if BIAS:
        tl.store(of_bias + sums, tl.sum(by_bias, 0), mask=c < channels)


@triton.jit
def _finish_twice(
    g, x, by_x, of_g, of_x, factors, bias, noise, by_factors, by_bias, by_noise, of_factors,
    pixels, channels, gain, slope, EACH: tl.constexpr,
    FACTORS: tl.constexpr, BIAS: tl.constexpr, NOISE: tl.constexpr,
    BY_X: tl.constexpr, BY_FACTORS: tl.constexpr, BY_BIAS: tl.constexpr, BY_NOISE: tl.constexpr,
    P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The derivative of `_finish_back`: how much what follows depends on g, x and factors, if it depends on the
    gradients of x, factors, bias and noise by `by_x`, ... Sums are a program's own, as there."""
    slab, image, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    c = block * C + tl.arange(0, C)
    known = c < channels
    total = tl.zeros((P, C), tl.float32)
    for tile in range(EACH):
        p = (slab * EACH + tile) * P + tl.arange(0, P)
        inside = (p < pixels)[:, None] & known[None, :]
        at = (image.to(tl.int64) * pixels + p)[:, None] * channels + c[None, :]
        given = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        change = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
        value = _summed(given, factors, bias, noise, c, p, channels, image, pixels, FACTORS, BIAS, NOISE)
        steep = tl.where(value > 0, gain, gain * slope)
        made = tl.zeros((P, C), tl.float32)
        if BY_X:
            wanted = tl.load(by_x + at, mask=inside, other=0.0).to(tl.float32)
            if FACTORS:
                total += steep * change * wanted
                wanted = wanted * tl.load(factors + image * channels + c, mask=known, other=0.0).to(tl.float32)[None, :]
            made += wanted
        if BY_FACTORS:
            share = tl.load(by_factors + image * channels + c, mask=known, other=0.0).to(tl.float32)[None, :]
            made += given * share
            tl.store(of_x + at, (steep * change * share).to(of_x.dtype.element_ty), mask=inside)
        if BY_BIAS:
            made += tl.load(by_bias + c, mask=known, other=0.0).to(tl.float32)[None, :]
        if BY_NOISE:
            made += tl.load(by_noise + image * pixels + p, mask=p < pixels, other=0.0).to(tl.float32)[:, None]
        tl.store(of_g + at, (steep * made).to(of_g.dtype.element_ty), mask=inside)
    if FACTORS and BY_X:
        tl.store(of_factors + (image * tl.num_programs(0) + slab) * channels + c, tl.sum(total, 0), mask=known)


def finish(x: Tensor, y: Tensor, rule: Rule, factors: Tensor | None, bias: Tensor | None, noise: Tensor | None) -> None:
    batch, channels, height, width = x.shape
    rows, columns = _tile(channels)
    grid = (triton.cdiv(height * width, rows), batch, triton.cdiv(channels, columns))
    _finish[grid](
        x, y, *_given(x, factors, bias, noise), height * width, channels, *rule, *_which(channels, factors, bias, noise)
    )


def finish_back(
    g: Tensor, x: Tensor, rule: Rule, factors: Tensor | None, bias: Tensor | None, noise: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, factors, bias and noise; those of what is None mean nothing."""
    (batch, channels), pixels = x.shape[:2], x.shape[2] * x.shape[3]
    grid, each = _slabs(x)
    slabs, _, blocks = grid
    of_x = torch.empty_like(x)
    of_factors, of_bias = x.new_empty(2, batch, slabs, channels, dtype=torch.float32)
    of_noise = x.new_empty(batch, blocks, pixels if noise is not None else 0, dtype=torch.float32)
    _finish_back[grid](
        g, x, of_x, *_given(x, factors, bias, noise), of_factors, of_bias, of_noise,
        pixels, channels, *rule, each, *_which(channels, factors, bias, noise),
    )  # fmt: skip
    return of_x, of_factors.sum(1), of_bias.sum((0, 1)), of_noise.sum(1)


def finish_twice(
    g: Tensor, x: Tensor, rule: Rule, others: Sequence[Tensor | None], changes: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The derivatives of the gradients w.r.t. g, x and factors; None where there is none. `others`: factors, bias and
    noise; `changes`: by how much what follows depends on the gradient of x and of each of them."""
    (batch, channels), pixels = x.shape[:2], x.shape[2] * x.shape[3]
    (slabs, _, blocks), each = _slabs(x)
    by_x, by_factors, *_ = changes
    weighed = others[0] is not None and by_x is not None
    of_g, of_x = torch.empty_like(g), torch.empty_like(x) if by_factors is not None else None
    of_factors = x.new_empty(batch, slabs, channels, dtype=torch.float32) if weighed else None
    made = (x if one is None else one for one in (by_x, of_g, of_x))
    _finish_twice[(slabs, batch, blocks)](
        g, x, *made, *_given(x, *others, *changes[1:], of_factors), pixels, channels, *rule, each,
        *_which(channels, *others, *changes),
    )  # fmt: skip
    return of_g, of_x, None if of_factors is None else of_factors.sum(1)


def _slabs(x: Tensor) -> tuple[tuple[int, int, int], int]:
    """How many programs share the pixels of an image, images, blocks of channels; and the tiles of each program."""
    rows, columns = _tile(x.shape[1])
    tiles = triton.cdiv(x.shape[2] * x.shape[3], rows)
    each = triton.cdiv(tiles, SLABS)
    return (triton.cdiv(tiles, each), len(x), triton.cdiv(x.shape[1], columns)), each


def _tile(channels: int) -> tuple[int, int]:
    """Pixels and channels of a tile: more pixels where there are few channels."""
    columns = min(CHANNELS, max(8, triton.next_power_of_2(channels)))
    return PIXELS * CHANNELS // columns, columns


def _given(x: Tensor, *others: Tensor | None) -> list[Tensor]:
    """A kernel wants a place in memory for each, even for what it does not read."""
    return [x if one is None else one.contiguous() for one in others]


def _which(channels: int, *others: Tensor | None) -> list[Any]:
    """Which of them there are, and the tile."""
    return [*(one is not None for one in others), *_tile(channels)]


# --- filters ------------------------------------------------------------------------------------------


@triton.jit
def _row(
    x, row, columns, c, inputs, channels,
    BEFORE: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A row of an image filtered along its columns [columns, channels], in fp32; beyond the border are zeros."""
    start = columns * STRIDE - BEFORE
    there = (c < channels)[None, :] & ((row >= 0) & (row < inputs))
    line = x + row.to(tl.int64) * inputs * channels
    total = tl.zeros((W, C), tl.float32)
    for tap in tl.static_range(4):
        column = start + tap
        inside = ((column >= 0) & (column < inputs))[:, None] & there
        value = tl.load(line + column[:, None] * channels + c[None, :], mask=inside, other=0.0).to(tl.float32)
        if tap % 3 == 0:
            total += value * 0.125
        else:
            total += value * 0.375
    return total


@triton.jit
def _sweep(
    x, y, inputs, side, channels,
    BEFORE: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Goes down a strip of ROWS rows: each row of the input is filtered once, and four of them make one of y."""
    blocks = tl.cdiv(channels, C)
    columns = (tl.program_id(0) // blocks) * W + tl.arange(0, W)
    c = (tl.program_id(0) % blocks) * C + tl.arange(0, C)
    first, image = tl.program_id(1) * ROWS, tl.program_id(2).to(tl.int64)
    x += image * inputs * inputs * channels
    y += image * side * side * channels
    row = first * STRIDE - BEFORE
    a = _row(x, row, columns, c, inputs, channels, BEFORE, STRIDE, W, C)
    b = _row(x, row + 1, columns, c, inputs, channels, BEFORE, STRIDE, W, C)
    d = _row(x, row + 2, columns, c, inputs, channels, BEFORE, STRIDE, W, C)
    wanted = (columns < side)[:, None] & (c < channels)[None, :]
    for k in range(ROWS):
        row = (first + k) * STRIDE - BEFORE
        e = _row(x, row + 3, columns, c, inputs, channels, BEFORE, STRIDE, W, C)
        made = (a + e) * 0.125 + (b + d) * 0.375
        at = ((first + k).to(tl.int64) * side + columns)[:, None] * channels + c[None, :]
        tl.store(y + at, made.to(y.dtype.element_ty), mask=wanted & (first + k < side))
        if STRIDE == 1:
            a, b, d = b, d, e
        else:
            a, b = d, e
            d = _row(x, row + 4, columns, c, inputs, channels, BEFORE, STRIDE, W, C)


@triton.jit
def _spread(
    x, y, inputs, side, channels, BEFORE: tl.constexpr, W: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """The transpose of `_sweep` with a stride of 2: from `side` back to `inputs`, a row of y for each program."""
    blocks = tl.cdiv(channels, C)
    columns = (tl.program_id(0) // blocks) * W + tl.arange(0, W)
    c = (tl.program_id(0) % blocks) * C + tl.arange(0, C)
    row, image = tl.program_id(1), tl.program_id(2).to(tl.int64)
    odd_row, odd = (row + BEFORE) % 2, (columns + BEFORE) % 2
    at_row, at = (row + BEFORE) // 2, (columns + BEFORE) // 2
    made = tl.zeros((W, C), tl.float32)
    for i in tl.static_range(2):
        for j in tl.static_range(2):
            r, q = at_row - i, at - j
            # the nearer of two has three quarters of the weight, along both sides
            near_row, near = odd_row * (1 - 2 * i) + i, odd * (1 - 2 * j) + j
            weights = (0.125 + 0.25 * near.to(tl.float32)) * (0.125 + 0.25 * near_row.to(tl.float32))
            inside = ((q >= 0) & (q < side))[:, None] & (c < channels)[None, :] & ((r >= 0) & (r < side))
            place = ((image * side + r) * side + q)[:, None] * channels + c[None, :]
            made += tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * weights[:, None]
    wanted = (columns < inputs)[:, None] & (c < channels)[None, :]
    place = ((image * inputs + row) * inputs + columns)[:, None] * channels + c[None, :]
    tl.store(y + place, made.to(y.dtype.element_ty), mask=wanted)


def sweep(x: Tensor, plan: FilterPlan) -> Tensor:
    """Feature maps x with channels last, filtered as the plan says."""
    batch, channels = x.shape[:2]
    made = plan.inputs if plan.back else plan.side
    y = torch.empty((batch, channels, made, made), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    strips = triton.cdiv(made, COLUMNS) * triton.cdiv(channels, CHANNELS)
    if plan.back and plan.stride == 2:
        _spread[(strips, made, batch)](x, y, plan.inputs, plan.side, channels, plan.before, COLUMNS, CHANNELS)
        return y
    # the filter is its own mirror image, so its transpose is the same filter with what is left of its width before
    before = 3 - plan.before if plan.back else plan.before
    grid = (strips, triton.cdiv(made, ROWS), batch)
    _sweep[grid](x, y, x.shape[-1], made, channels, before, plan.stride, ROWS, COLUMNS, CHANNELS)
    return y
