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
    (batch norm's counter) are rounded back. On a GPU the tensors of one type are joined first: a kernel for each of
    hundreds of small ones would take longer than the sums.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._shapes: dict[str, tuple[torch.dtype, torch.Size]] = {}
        self._weight = 0
        self._is_joined = False

    def add(self, tensors: Mapping[str, Tensor], weight: int) -> None:
        if not self._shapes:
            self._shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        if tensors.keys() != self._shapes.keys():
            raise WorkFailed(f"the sites sent different tensors: {sorted(tensors.keys() ^ self._shapes.keys())[:3]}")
        if tensors:
            self._add({name: tensors[name] for name in self._shapes}, weight)
        self._weight += weight

    def _add(self, tensors: dict[str, Tensor], weight: int) -> None:
        if not self._sums:
            self._is_joined = _lie_on_gpu(tensors.values())
        if self._is_joined and {name: (one.dtype, one.shape) for name, one in tensors.items()} != self._shapes:
            raise WorkFailed("the sites sent tensors of different shapes or types")
        found = _joined(tensors) if self._is_joined else tensors
        if not self._sums:
            self._sums = {name: torch.zeros_like(one, dtype=torch.float64) for name, one in found.items()}
        # a product of a float32 and a number of images is exact in float64: the same sums on a GPU as on a CPU
        torch._foreach_add_(list(self._sums.values()), list(found.values()), alpha=weight)

    def tensors(self) -> dict[str, Tensor]:
        if not self._is_joined:
            return {name: self._mean(name, dtype) for name, (dtype, _) in self._shapes.items()}
        kinds = dict.fromkeys(dtype for dtype, _ in self._shapes.values())
        means = {dtype: self._mean(str(dtype), dtype) for dtype in kinds}
        return _parted(means, self._shapes)

    def _mean(self, name: str, dtype: torch.dtype) -> Tensor:
        # by a tensor: a GPU divides by a plain number less exactly
        mean = self._sums[name] / self._sums[name].new_full((), self._weight)
        return mean.to(dtype) if dtype.is_floating_point else mean.round().to(dtype)


def _lie_on_gpu(tensors: Iterable[Tensor]) -> bool:
    return all(one.is_cuda for one in tensors)


def _joined(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All numbers of each type in one row, by the type's name."""
    types = dict.fromkeys(one.dtype for one in tensors.values())
    return {str(kind): torch.cat([one.flatten() for one in tensors.values() if one.dtype == kind]) for kind in types}


def _parted(
    rows: Mapping[torch.dtype, Tensor], shapes: Mapping[str, tuple[torch.dtype, torch.Size]]
) -> dict[str, Tensor]:
    """The tensors of these shapes, each with memory of its own, from rows of all numbers of a type."""
    found: dict[str, Tensor] = {}
    for kind, row in rows.items():
        own = {name: shape for name, (dtype, shape) in shapes.items() if dtype == kind}
        pieces = row.split([shape.numel() for shape in own.values()])
        made = [torch.empty(shape, dtype=kind, device=row.device) for shape in own.values()]
        torch._foreach_copy_([one.flatten() for one in made], list(pieces))
        found |= dict(zip(own, made, strict=True))
    return {name: found[name] for name in shapes}
