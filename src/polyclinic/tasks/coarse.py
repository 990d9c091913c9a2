"""Coarse scores: what a deployed site releases of its metrics, so that no number is about a few patients."""

from __future__ import annotations

import torch
from torch import Tensor

DIGITS = 3


def significant(value: Tensor, digits: int = DIGITS) -> Tensor:
    """A number rounded to a few significant digits."""
    values = [float(f"{one:.{digits}g}") for one in value.double().flatten().tolist()]
    return torch.tensor(values, dtype=torch.float64).reshape(value.shape).to(value.dtype)


def to_multiples(counts: Tensor, step: int) -> Tensor:
    """Counts, each rounded to the nearest multiple of `step`; halves go up."""
    return (counts + step // 2) // step * step


def merge_small(counts: Tensor, least: int, width: int = 1) -> Tensor:
    """A histogram [K], float64, that tells of nothing smaller than `width` bins with `least` images together.

    Bins are taken `width` at a time; neighbours are put together, from the lowest on, until they hold `least`. What is
    left at the end joins the last group; fewer than `least` in all become none. A group's images are spread evenly over
    its bins, so that areas under curves come out alike.
    """
    wide = counts.reshape(-1, width).sum(1).tolist()
    spread = torch.zeros(len(counts), dtype=torch.float64)
    for first, last, images in _groups(wide, least):
        spread[first * width : (last + 1) * width] = images / ((last + 1 - first) * width)
    return spread


def _groups(counts: list[int], least: int) -> list[tuple[int, int, int]]:
    """(first bin, last bin, images) of groups of `least` images or more."""
    groups: list[tuple[int, int, int]] = []
    first, images, last = -1, 0, -1
    for place, count in enumerate(counts):
        if not count:
            continue
        first, last, images = (place if first < 0 else first), place, images + count
        if images >= least:
            groups.append((first, last, images))
            first, images = -1, 0
    if images and groups:
        begun, _, before = groups.pop()
        groups.append((begun, last, before + images))
    return groups
