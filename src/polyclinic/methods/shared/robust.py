"""Robust aggregation: means of the sites' weights that a few poisoned updates cannot move far (`method.aggregation`).

All of them look at updates, what a site's weights differ from those that it was sent. Whole numbers, such as batch
norm's counter, are averaged as usual.

- `norm-bound` (Sun et al. 2019): an update longer than the median of all updates is shortened to that.
- `median`, `trimmed-mean` (Yin et al. 2018): for each number by itself, the median of the sites, or the mean without
  the largest and the smallest `trim` of them.
- `multi-krum` (Blanchard et al. 2017): the mean of those updates that lie nearest to their neighbours.
- `clusters` (Sattler et al. 2020, against label flips and back doors): the sites are split in two so that the largest
  cosine between an update of one and of the other part is smallest; where that is below `apart`, the mean of the
  larger part.

Under skewed labels an honest site that is unlike all others looks like an attacker, and all but `norm-bound` drop it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from polyclinic.errors import WorkFailed
from polyclinic.federation.call import Reply
from polyclinic.methods.shared.averaging import WeightedMean

Aggregation = Literal["mean", "norm-bound", "median", "trimmed-mean", "multi-krum", "clusters"]


def aggregate(
    rule: Aggregation,
    before: Mapping[str, Tensor],
    replies: Sequence[Reply],
    counts: Sequence[float],
    share: float,
    apart: float,
) -> dict[str, Tensor]:
    """The next weights by a robust rule; `share` is the largest share of sites that may lie.

    `counts` are the numbers of images by which sites count in `norm-bound`; the other rules count sites alike, since a
    number that a site says of itself would be one more thing to lie about.
    """
    if not replies:
        raise WorkFailed("no site has sent weights")
    weights = [reply.weights for reply in replies]
    names = [name for name, tensor in weights[0].items() if tensor.is_floating_point()]
    rows = torch.stack([_flat(one, before, names) for one in weights])
    if rule == "norm-bound":
        update = _weighted(_bounded(rows), counts)
    elif rule == "median":
        update = _trimmed_mean(rows, (len(rows) - 1) // 2)
    elif rule == "trimmed-mean":
        update = _trimmed_mean(rows, _liars(len(rows), share))
    elif rule == "clusters":
        update = rows[larger_cluster(rows, apart)].mean(0)
    else:
        update = rows[multi_krum(rows, _liars(len(rows), share))].mean(0)
    return {**_counters(weights, set(names)), **_unflat(update, before, weights[0], names)}


def multi_krum(rows: Tensor, liars: int) -> Tensor:
    """Which updates [K, n] are kept, all but `liars` of them: those with the smallest sum of squared distances to
    their K - liars - 2 nearest neighbours, at least one."""
    sites = len(rows)
    distances = torch.cdist(rows, rows).square()
    nearest = max(1, sites - liars - 2)
    scores = distances.sort(1).values[:, 1 : 1 + nearest].sum(1)
    return scores.argsort(stable=True)[: max(1, sites - liars)].sort().values


def larger_cluster(rows: Tensor, apart: float) -> Tensor:
    """Which updates [K, n] are kept: all, or the larger of two parts whose updates point apart (the first on a tie).

    Joining the two most alike parts again and again until two are left (single linkage) gives the split whose largest
    cosine across it is the smallest of all splits, as the paper asks for.
    """
    lengths = rows.norm(dim=1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    alike = (rows / lengths) @ (rows / lengths).T
    parts = [[site] for site in range(len(rows))]
    while len(parts) > 2:
        pairs = [(a, b) for b in range(len(parts)) for a in range(b)]
        a, b = max(pairs, key=lambda pair: float(alike[parts[pair[0]]][:, parts[pair[1]]].max()))
        parts[a] += parts.pop(b)
    if len(parts) == 1 or float(alike[parts[0]][:, parts[1]].max()) >= apart:
        return torch.arange(len(rows))
    return torch.tensor(sorted(_longest(parts)))


def _longest(parts: list[list[int]]) -> list[int]:
    return max(parts, key=len)


def _liars(sites: int, share: float) -> int:
    """How many of the sites may lie: always fewer than half of them."""
    return min(int(share * sites), (sites - 1) // 2)


def _bounded(rows: Tensor) -> Tensor:
    """Updates that are shortened to the median of their lengths."""
    lengths = rows.norm(dim=1, keepdim=True)
    limit = lengths.quantile(0.5)
    return rows * (limit / lengths.clamp(min=torch.finfo(rows.dtype).tiny)).clamp(max=1)


def _weighted(rows: Tensor, counts: Sequence[float]) -> Tensor:
    weights = torch.tensor(counts, dtype=rows.dtype)
    return (weights / weights.sum()) @ rows


def _trimmed_mean(rows: Tensor, liars: int) -> Tensor:
    """The mean of each column without its `liars` largest and smallest values."""
    return rows.sort(0).values[liars : len(rows) - liars].mean(0)


def _flat(weights: Mapping[str, Tensor], before: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """A site's update as one row of float64 on the CPU; names that were not sent count from zero."""
    pieces = [
        (weights[name].double().cpu() - (before[name].double().cpu() if name in before else 0)).flatten()
        for name in names
    ]
    return torch.cat(pieces)


def _unflat(
    update: Tensor, before: Mapping[str, Tensor], like: Mapping[str, Tensor], names: Sequence[str]
) -> dict[str, Tensor]:
    pieces = update.split([like[name].numel() for name in names])
    found = {}
    for name, piece in zip(names, pieces, strict=True):
        start = before[name].double().cpu() if name in before else 0
        found[name] = (start + piece.reshape(like[name].shape)).to(like[name].dtype).to(like[name].device)
    return found


def _counters(weights: Sequence[Mapping[str, Tensor]], floats: set[str]) -> dict[str, Tensor]:
    mean = WeightedMean()
    for one in weights:
        mean.add({name: tensor for name, tensor in one.items() if name not in floats}, 1)
    return mean.tensors()
