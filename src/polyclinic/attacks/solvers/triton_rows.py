"""Batch norm and sigmoid of single images, with their first and second derivatives, in one pass each on a GPU.

Whoever imports this file needs Triton. A row holds all pixels of one channel of one target: a program takes it from
memory once, and has sums and results from there. Names in capitals are known when a program is compiled.
"""
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: numbers that a program works on where rows do not matter
BLOCK = 1024


@triton.jit
def _normalise(images, weight, bias, out, mean, scale, eps, pixels, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside, at = place < pixels, row * pixels + place
    x = tl.load(images + at, mask=inside, other=0.0)
    m = tl.sum(x, 0) / pixels
    centred = tl.where(inside, x - m, 0.0)
    s = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / pixels + eps)
    tl.store(mean + row, m)
    tl.store(scale + row, s)
    tl.store(out + at, tl.load(weight + row) * s * centred + tl.load(bias + row), mask=inside)


def normalise(images: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Images [1, C, H, W], weight and bias [C]: the normalised images, mean [C] and 1 / standard deviation [C]."""
    out, mean, scale = torch.empty_like(images), torch.empty_like(weight), torch.empty_like(weight)
    rows, pixels, block = _rows(images)
    _normalise[(rows,)](images, weight, bias, out, mean, scale, eps, pixels, block)
    return out, mean, scale


@triton.jit
def _normalise_backward(g, images, weight, mean, scale, out, along, total, pixels, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside, at = place < pixels, row * pixels + place
    s = tl.load(scale + row)
    gradient = tl.load(g + at, mask=inside, other=0.0)
    n = tl.where(inside, (tl.load(images + at, mask=inside, other=0.0) - tl.load(mean + row)) * s, 0.0)
    of_bias, of_weight = tl.sum(gradient, 0), tl.sum(gradient * n, 0)
    tl.store(total + row, of_bias)
    tl.store(along + row, of_weight)
    value = tl.load(weight + row) * s * (gradient - of_bias / pixels - n * (of_weight / pixels))
    tl.store(out + at, value, mask=inside)


def normalise_backward(
    g: Tensor, images: Tensor, weight: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of images, weight and bias for the gradient g of the output."""
    out, along, total = torch.empty_like(images), torch.empty_like(mean), torch.empty_like(mean)
    rows, pixels, block = _rows(images)
    _normalise_backward[(rows,)](g, images, weight, mean, scale, out, along, total, pixels, block)
    return out, along, total


@triton.jit
def _normalise_twice(
    v, v_weight, v_bias, g, images, weight, mean, scale, along, total, of_g, of_images, of_weight, pixels,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The letters are those of `vmap_batch_norm._NormaliseBackward`."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside, at = place < pixels, row * pixels + place
    s, vw = tl.load(scale + row), tl.load(v_weight + row)
    mg, mgn = tl.load(total + row) / pixels, tl.load(along + row) / pixels
    given = tl.load(v + at, mask=inside, other=0.0)
    apart = tl.where(inside, tl.load(g + at, mask=inside, other=0.0) - mg, 0.0)
    n = tl.where(inside, (tl.load(images + at, mask=inside, other=0.0) - tl.load(mean + row)) * s, 0.0)
    mv, mvn, mvg = tl.sum(given, 0) / pixels, tl.sum(given * n, 0) / pixels, tl.sum(given * apart, 0) / pixels
    ws = tl.load(weight + row) * s
    first = tl.load(v_bias + row) + ws * (given - mv) + (vw - ws * mvn) * n
    tl.store(of_g + at, first, mask=inside)
    per_n = -ws * s * (mvg - 3.0 * mvn * mgn) - vw * s * mgn
    second = -ws * s * mgn * (given - mv) + (vw * s - ws * s * mvn) * apart + per_n * n
    tl.store(of_images + at, second, mask=inside)
    tl.store(of_weight + row, s * pixels * (mvg - mvn * mgn))


def normalise_twice(
    gradients: tuple[Tensor, Tensor, Tensor],
    given: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    sums: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """The derivative of `normalise_backward`, whose arguments were `given` and last two results `sums`."""
    images = given[1]
    of_g, of_images, of_weight = torch.empty_like(images), torch.empty_like(images), torch.empty_like(given[3])
    rows, pixels, block = _rows(images)
    per_channel = (one.contiguous() for one in gradients[1:])
    _normalise_twice[(rows,)](
        gradients[0], *per_channel, *given, *sums, of_g, of_images, of_weight, pixels, block
    )  # fmt: skip
    return of_g, of_images, of_weight


def _rows(images: Tensor) -> tuple[int, int, int]:
    """Rows, pixels of each, and how many numbers a program holds for them."""
    pixels = images.shape[2] * images.shape[3]
    return images.shape[1], pixels, triton.next_power_of_2(pixels)


@triton.jit
def _sigmoid_twice(v, g, y, of_g, of_y, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    a, b, c = tl.load(v + at, mask=inside), tl.load(g + at, mask=inside), tl.load(y + at, mask=inside)
    tl.store(of_g + at, a * c * (1.0 - c), mask=inside)
    tl.store(of_y + at, a * b * (1.0 - 2.0 * c), mask=inside)


def sigmoid_twice(v: Tensor, g: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of g and of y for the gradient v of g · y · (1 - y); all float32 and contiguous."""
    of_g, of_y = torch.empty_like(g), torch.empty_like(g)
    _sigmoid_twice[(triton.cdiv(g.numel(), BLOCK),)](v, g, y, of_g, of_y, g.numel(), BLOCK)
    return of_g, of_y


def are_right(device: torch.device) -> bool:
    """Whether the four passes give what torch gives, for a few numbers. Autograd cannot be asked: this may be called
    while `vmap` is at work."""
    x, g, v = (torch.sin(torch.arange(first, first + 105.0, device=device)).view(1, 3, 5, 7) for first in (0, 300, 700))
    w, b, vw, vb = (x[0, :, i, 0].contiguous() for i in range(4))
    found, mean, scale = normalise(x, w, b, 1e-5)
    backward = normalise_backward(g, x, w, mean, scale)
    twice = normalise_twice((v, vw, vb), (g, x, w, mean, scale), (backward[1], backward[2]))
    y = x.sigmoid()
    m, s = (one[:, None, None] for one in (mean, scale))
    n, wide, vw = (x - m) * s, w[:, None, None], vw[:, None, None]
    first = wide * s * (g - _mean(g) - n * _mean(g * n))
    of_g = vb[:, None, None] + wide * s * (v - _mean(v) - n * _mean(v * n)) + vw * n
    apart = v - _mean(v), g - _mean(g)
    slope = _mean(v * apart[1]) - 3 * _mean(v * n) * _mean(g * n)
    of_x = -wide * s * s * (_mean(g * n) * apart[0] + _mean(v * n) * apart[1] + slope * n)
    of_x = of_x + vw * s * (apart[1] - _mean(g * n) * n)
    of_w = (35 * s * (_mean(v * apart[1]) - _mean(v * n) * _mean(g * n))).flatten()
    pairs = [(mean, x.mean((0, 2, 3))), (scale, (x.var((0, 2, 3), correction=0) + 1e-5).rsqrt())]
    pairs += [(found, wide * n + b[:, None, None]), (backward[0], first)]
    pairs += [(backward[1], (g * n).sum((0, 2, 3))), (backward[2], g.sum((0, 2, 3)))]
    pairs += zip(twice, (of_g, of_x, of_w), strict=True)
    pairs += zip(sigmoid_twice(v, g, y), (v * y * (1 - y), v * g * (1 - 2 * y)), strict=True)
    return all(torch.allclose(one, other, rtol=1e-3, atol=1e-4) for one, other in pairs)


def _mean(images: Tensor) -> Tensor:
    return images.mean((2, 3), keepdim=True)
