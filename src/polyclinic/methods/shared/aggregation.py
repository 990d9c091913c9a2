"""Means of what the sites sent: weighted (FedAvg), or robust, which a few poisoned updates cannot move far.

Robust rules (`method.aggregation`) look at updates, what a site's weights differ from those that it was sent. Whole
numbers, such as batch norm's counter, are averaged as usual.

- `norm-bound` (Sun et al. 2019): an update longer than the median of all updates is shortened to that.
- `median`, `trimmed-mean` (Yin et al. 2018): for each number by itself, the median of the sites, or the mean without
  the largest and the smallest `trim` of them.
- `multi-krum` (Blanchard et al. 2017): the mean of those updates that lie nearest to their neighbours.
- `clusters` (Sattler et al. 2020, against label flips and back doors): the sites are split in two so that the largest
  cosine between an update of one and of the other part is smallest; where that is below `apart`, the mean of the
  larger part.

Under skewed labels an honest site that is unlike all others looks like an attacker, and all but `norm-bound` drop it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from polyclinic.errors import WorkFailed
from polyclinic.federation.call import Reply
from polyclinic.federation.federation import Federation
from polyclinic.federation.ledger.kinds import ParcelRejected


def average(replies: Iterable[Reply], weighting: str = "samples", kind: str = "weights") -> dict[str, Tensor]:
    """The mean of what the sites sent, weighted by their numbers of images or all alike."""
    [mean] = averages(replies, weighting, kind)
    return mean


def averages(replies: Iterable[Reply], weighting: str, *kinds: str) -> list[dict[str, Tensor]]:
    """The means of several kinds. Replies are taken one by one, so only one of them need be in memory."""
    means = [WeightedMean() for _ in kinds]
    for reply in replies:
        for kind, mean in zip(kinds, means, strict=True):
            mean.add(reply.parcel(kind).tensors, reply.metadata["samples"] if weighting == "samples" else 1)
    return [mean.tensors() for mean in means]


def count_sites(replies: Iterable[Reply]) -> int:
    """The number of sites that replied; a reply of all sites together (`federation.sum`) says of how many it is."""
    return sum(int(reply.metadata.get("sites", 1)) for reply in replies)


class WeightedMean:
    """The mean of sets of tensors that come one after the other.

    Sums run in float64 and in the order of the sites, so that the result is the same every time; whole numbers
    (batch norm's counter) are rounded back.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._types: dict[str, torch.dtype] = {}
        self._weight = 0

    def add(self, tensors: Mapping[str, Tensor], weight: int) -> None:
        if not self._types:
            self._types = {name: one.dtype for name, one in tensors.items()}
            self._sums = {name: torch.zeros_like(one, dtype=torch.float64) for name, one in tensors.items()}
        if tensors.keys() != self._sums.keys():
            raise WorkFailed(f"the sites sent different tensors: {sorted(tensors.keys() ^ self._sums.keys())[:3]}")
        if tensors:
            # a product of a float32 and a number of images is exact in float64: the same sums on a GPU as on a CPU
            torch._foreach_add_(list(self._sums.values()), [tensors[name] for name in self._sums], alpha=weight)
        self._weight += weight

    def tensors(self) -> dict[str, Tensor]:
        means = {}
        for name, total in self._sums.items():
            # by a tensor: a GPU divides by a plain number less exactly
            mean, dtype = total / total.new_full((), self._weight), self._types[name]
            means[name] = mean.to(dtype) if dtype.is_floating_point else mean.round().to(dtype)
        return means


# --- robust rules (`method.aggregation`) --------------------------------------------------------------

Aggregation = Literal["mean", "norm-bound", "median", "trimmed-mean", "multi-krum", "clusters"]


def robust_mean(
    rule: Aggregation,
    before: Mapping[str, Tensor],
    replies: Sequence[Reply],
    weighting: str,
    liars: float,
    apart: float,
) -> dict[str, Tensor]:
    """The next weights by a robust rule; `liars` is the largest share of sites that may lie.

    `weighting` is for `norm-bound`; the other rules count sites alike, since a number that a site says of itself would
    be one more thing to lie about.
    """
    if not replies:
        raise WorkFailed("no site has sent weights")
    weights = [reply.weights for reply in replies]
    names = [name for name, tensor in weights[0].items() if tensor.is_floating_point()]
    # updates as rows of float64 on the CPU; names that were not sent count from zero
    start = {name: before[name].double().cpu() if name in before else 0 for name in names}
    updates = [torch.cat([(one[name].double().cpu() - start[name]).flatten() for name in names]) for one in weights]
    rows = torch.stack(updates)
    most = min(int(liars * len(rows)), (len(rows) - 1) // 2)  # sites that may lie: always fewer than half of them
    if rule == "norm-bound":
        counts = [reply.metadata["samples"] if weighting == "samples" else 1 for reply in replies]
        shares = torch.tensor(counts, dtype=rows.dtype)
        lengths = rows.norm(dim=1, keepdim=True)
        shortened = (lengths.quantile(0.5) / lengths.clamp(min=torch.finfo(rows.dtype).tiny)).clamp(max=1)
        update = (shares / shares.sum()) @ (rows * shortened)
    elif rule == "median":
        update = _trimmed_mean(rows, (len(rows) - 1) // 2)
    elif rule == "trimmed-mean":
        update = _trimmed_mean(rows, most)
    elif rule == "clusters":
        update = rows[larger_cluster(rows, apart)].mean(0)
    else:
        update = rows[multi_krum(rows, most)].mean(0)
    counters = WeightedMean()
    for one in weights:
        counters.add({name: tensor for name, tensor in one.items() if name not in names}, 1)
    found = counters.tensors()
    for name, piece in zip(names, update.split([weights[0][name].numel() for name in names]), strict=True):
        like = weights[0][name]
        found[name] = (start[name] + piece.reshape(like.shape)).to(like.dtype).to(like.device)
    return found


def multi_krum(rows: Tensor, liars: int) -> Tensor:
    """Places of the updates [K, n] that are kept, all but `liars`: those with the smallest sum of squared distances to
    their K - liars - 2 nearest neighbours, at least one."""
    sites = len(rows)
    distances = torch.cdist(rows, rows).square()
    nearest = max(1, sites - liars - 2)
    scores = distances.sort(1).values[:, 1 : 1 + nearest].sum(1)
    return scores.argsort(stable=True)[: max(1, sites - liars)].sort().values


def larger_cluster(rows: Tensor, apart: float) -> Tensor:
    """Places of the updates [K, n] that stay: all, or the larger of two parts that point apart (the first on a tie).

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
    return torch.tensor(sorted(sorted(parts, key=len, reverse=True)[0]))


def _trimmed_mean(rows: Tensor, liars: int) -> Tensor:
    """The mean of each column without its `liars` largest and smallest values."""
    return rows.sort(0).values[liars : len(rows) - liars].mean(0)


# --- what a mean needs of each reply: its checks raise ParcelRejected -----------------------------------------


def check_shared_weights(federation: Federation, reply: Reply) -> None:
    """The weights name all that the method shares of the network: a mean of different names is not defined."""
    trainer = federation.trainer
    whole = set(trainer.state())
    check_names(reply, whole - trainer.local_names or whole)


def check_names(reply: Reply, wanted: set[str]) -> None:
    """The weights have these names."""
    came = reply.parcel("weights").tensors.keys()
    if came != wanted:
        differ = sorted(came ^ wanted)
        raise ParcelRejected(f"weights: the names are not those that the method shares; they differ in {differ[:3]}")


def check_samples(reply: Reply) -> None:
    """The reply says of how many images it is: the mean over the sites is weighted by that."""
    if "samples" not in reply.metadata:
        raise ParcelRejected("the reply does not say of how many images it is ('samples')")
