"""Stratified assignment, shared by several partitions: each stratum goes to the sites in fixed proportions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from polyclinic.data.dataset import Dataset
from polyclinic.data.partitions.base import Address
from polyclinic.data.partitions.dealing import cuts
from polyclinic.randomness import numpy_rng

#: gives the stratum of each image at `index`, int64 [len(index)]
StrataOf = Callable[[Dataset, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class StratumShares:
    """`shares` float64 [strata, sites]: each site's part of a stratum; what a row lacks to 1 is left out."""

    names: tuple[str, ...]
    strata_of: StrataOf
    shares: np.ndarray

    def assign(self, dataset: Dataset, index: np.ndarray, address: Address) -> dict[str, np.ndarray]:
        strata = self.strata_of(dataset, index)
        parts: dict[str, list[np.ndarray]] = {name: [] for name in self.names}
        for stratum, shares in enumerate(self.shares):
            members = numpy_rng(*address, stratum).permutation(index[strata == stratum])
            with_rest = np.append(shares, 1 - shares.sum())
            for name, part in zip(self.names, np.split(members, cuts(with_rest, len(members))), strict=False):
                parts[name].append(part)
        return {name: np.sort(np.concatenate(found)) for name, found in parts.items()}


def label_strata(labels: np.ndarray, classes: int, bins: int = 10) -> tuple[StrataOf, int]:
    """Strata by class, or by quantile of a regression label (`bins` of them); and how many there are."""
    if classes:
        return (lambda dataset, index: dataset.labels[index]), classes
    edges = np.quantile(labels, np.linspace(0, 1, bins + 1)[1:-1])
    return (lambda dataset, index: np.searchsorted(edges, dataset.labels[index], side="right")), bins
