"""Noised scores: what differential privacy needs to release sums of scores, whoever reads them.

One image adds a vector of at most length 1 to what noise falls on. All that is done afterwards looks at no image.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

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
