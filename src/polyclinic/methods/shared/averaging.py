"""Weighted averages of what the sites sent (FedAvg)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from polyclinic.errors import WorkFailed
from polyclinic.federation.call import Reply


def average(replies: Iterable[Reply], weighting: str = "samples", kind: str = "weights") -> dict[str, Tensor]:
    """The mean of what the sites sent, weighted by their numbers of images or all alike."""
    [mean] = averages(replies, weighting, kind)
    return mean


def averages(replies: Iterable[Reply], weighting: str, *kinds: str) -> list[dict[str, Tensor]]:
    """The means of several kinds. Replies are taken one by one, so only one of them need be in memory."""
    means = {kind: WeightedMean() for kind in kinds}
    for reply in replies:
        weight = weight_of(reply, weighting)
        for kind, mean in means.items():
            mean.add(reply.parcel(kind).tensors, weight)
    return [mean.tensors() for mean in means.values()]


def weight_of(reply: Reply, weighting: str) -> int:
    """By how much a site counts in a mean: its number of images, or 1."""
    return reply.metadata["samples"] if weighting == "samples" else 1


def count_sites(replies: Iterable[Reply]) -> int:
    """How many sites replied; a reply of all sites together (`federation.sum`) says of how many it is."""
    return sum(int(reply.metadata.get("sites", 1)) for reply in replies)


class WeightedMean:
    """The mean of sets of tensors that come one after the other.

    Sums run in float64 and in the order of the sites, so that the result is the same every time; whole numbers
    (batch norm's counter) are rounded back.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._weight = 0

    def add(self, tensors: Mapping[str, Tensor], weight: int) -> None:
        if not self._dtypes:
            self._dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
            self._sums = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in tensors.items()}
        if tensors.keys() != self._sums.keys():
            raise WorkFailed(f"the sites sent different tensors: {sorted(tensors.keys() ^ self._sums.keys())[:3]}")
        # a product of a float32 and a number of images is exact in float64: the same sums on a GPU as on a CPU
        if tensors:
            torch._foreach_add_(list(self._sums.values()), [tensors[name] for name in self._sums], alpha=weight)
        self._weight += weight

    def tensors(self) -> dict[str, Tensor]:
        return {name: self._mean(name, dtype) for name, dtype in self._dtypes.items()}

    def _mean(self, name: str, dtype: torch.dtype) -> Tensor:
        # by a tensor: a GPU divides by a plain number less exactly
        mean = self._sums[name] / self._sums[name].new_full((), self._weight)
        return mean.to(dtype) if dtype.is_floating_point else mean.round().to(dtype)
