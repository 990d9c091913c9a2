"""Scores as a site releases them: coarse (a deployed site), or with noise (differential privacy).

Coarse: the cells of a histogram have fixed edges, cover the whole axis, and hold `least` images or more. Counts are 0,
or `least` and more, in steps. A mean of numbers that one image can change by no more than `bound / images` is rounded
to steps of at least that size.

Noised: one image adds a vector of at most length 1 to what noise falls on. All that is done afterwards looks at no
image.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from polyclinic.metrics.statistics.safe import step_above


def round_counts(counts: Tensor, least: int) -> Tensor:
    """Counts in steps of half of `least`; those below `least` become 0 or `least`, the nearer one. Halves go up."""
    step = max(1, least // 2)
    rounded = (counts + step // 2) // step * step
    small = torch.where(2 * counts >= least, least, 0)
    return torch.where(counts < least, small, rounded).to(counts.dtype)


def round_mean(mean: Tensor, images: int, bound: float) -> Tensor:
    """A mean over so many images, each of which adds between -bound and bound, cut off there and rounded to a multiple
    of a step: 1, 2 or 5 times a power of ten, and no smaller than what one image can change."""
    step = step_above(bound / max(images, 1))
    return (mean.double().clamp(-bound, bound) / step).round() * step


def merge_small(counts: Tensor, least: int, width: int = 1, tail: int = 0) -> Tensor:
    """A histogram [K], float64, whose cells hold `least` images or more each, in counts as `round_counts` has them.

    The first and the last `tail` bins are counted in the bins next to them. The others are taken `width` at a time, and
    neighbours are put together, from the lowest on, until they hold `least`; what is left at the end joins the last
    cell. Cells cover the whole axis: whether bins at its ends or between images are empty is not told, so that nobody
    sees how far from all others an image lies. Fewer than `least` in all become none. The images of a cell are spread
    evenly over its bins.
    """
    inner = counts[tail : len(counts) - tail].clone()
    inner[0] += counts[:tail].sum()
    inner[-1] += counts[len(counts) - tail :].sum()
    spread = torch.zeros(len(counts), dtype=torch.float64)
    for first, last, images in _cells(inner.reshape(-1, width).sum(1).tolist(), least):
        told = float(round_counts(torch.tensor(images), least))
        spread[tail + first * width : tail + last * width] = told / ((last - first) * width)
    return spread


def _cells(counts: list[int], least: int) -> list[tuple[int, int, int]]:
    """(first bin, bin after the last one, images) of cells with `least` images or more, without gaps between them."""
    cells, first, images = [], 0, 0
    for place, count in enumerate(counts, 1):
        images += count
        if images >= least:
            cells.append((first, place, images))
            first, images = place, 0
    if not cells:
        return []
    begun, _, before = cells.pop()
    return [*cells, (begun, len(counts), before + images)]


#: standard normal numbers times the noise of the study, in the shape of a tensor
AddNoise = Callable[[Tensor], Tensor]


def with_noise(sums: Tensor, length: float, noise: AddNoise) -> Tensor:
    """Sums to which one image adds at most `length`, with noise in proportion to it, float64."""
    return sums.double() + length * noise(sums.double())


def nearest_counts(values: Tensor, total: float) -> Tensor:
    """The numbers nearest to `values` [K] that are not negative and add up to `total` (projection on a simplex).

    To cut off negative numbers alone would make the sum too large, the more so the more cells are empty.
    """
    if total <= 0:
        return torch.zeros_like(values)
    sorted_, places = values.sort(descending=True).values, torch.arange(1, len(values) + 1)
    shifts = (sorted_.cumsum(0) - total) / places
    last = int((sorted_ > shifts).nonzero().max())
    return (values - shifts[last]).clamp(min=0)


def whole_counts(values: Tensor, total: int) -> Tensor:
    """Counts, int64, near to `values` [K] that add up to `total`: the largest rests are rounded up."""
    counts = values.floor().long()
    rests = (values - counts).argsort(descending=True, stable=True)
    counts[rests[: total - int(counts.sum())]] += 1
    return counts
