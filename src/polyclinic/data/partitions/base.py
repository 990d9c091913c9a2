"""The base class of partitions, the `[sites]` table of a study, and what several of them share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from pydantic import Field, model_validator

from polyclinic.data.dataset import Dataset
from polyclinic.randomness import numpy_rng
from polyclinic.settings import Settings

Address = tuple[str | int, ...]


class Plan(Protocol):
    """The rule that a partition learnt from the training images; it spreads any split in the same way."""

    def assign(self, dataset: Dataset, index: np.ndarray, address: Address) -> dict[str, np.ndarray]:
        """The indices of each site, sorted, out of `index`; every index is used at most once.

        `address` seeds the draws; it differs from split to split.
        """
        ...


class Sites(Settings):
    """One subclass per partition, in one file of `data/partitions/`, with its own settings as fields."""

    partition: str = Field(description="how the images are spread over the sites")
    names: tuple[str, ...] | None = Field(None, description="names of the sites, instead of a count")
    count: int | None = Field(None, ge=1, le=10_000, description="number of sites, named site-1, site-2, ...")

    #: whether the partition finds its sites in the data, so that neither names nor count is needed
    finds_sites: ClassVar[bool] = False

    @model_validator(mode="after")
    def _one_way_to_name_the_sites(self) -> Sites:
        if self.names is not None and self.count is not None:
            raise ValueError("give names or count, not both")
        if self.names is None and self.count is None and not self.finds_sites:
            raise ValueError(f"the {self.partition} partition needs names or count")
        if self.names is not None and (not self.names or len(set(self.names)) < len(self.names)):
            raise ValueError("names must be at least one, and all different")
        return self

    def site_names(self) -> tuple[str, ...]:
        """Names of the sites, in order."""
        return self.names if self.names is not None else tuple(f"site-{k + 1}" for k in range(self.count or 0))

    def left_out(self, dataset: Dataset) -> dict[str, int]:
        """Images that belong to no site of the study, by where they come from; none in most partitions."""
        return {}

    @abstractmethod
    def plan(self, dataset: Dataset, train: np.ndarray, address: Address) -> Plan:
        """The plan to spread images over the sites, learnt from the training images at `train` only."""


def cuts(shares: np.ndarray, total: int) -> np.ndarray:
    """The places at which to cut `total` images into parts of the given shares (they sum to 1): int64 [len(shares) -
    1]."""
    return np.rint(np.cumsum(shares)[:-1] * total).astype(np.int64)


def slices(names: Sequence[str], ordered: np.ndarray, shares: np.ndarray) -> dict[str, np.ndarray]:
    """Consecutive parts of `ordered` in the given shares, one per name, each sorted."""
    parts = np.split(ordered, cuts(shares, len(ordered)))
    return {name: np.sort(part) for name, part in zip(names, parts, strict=True)}


def equal_slices(names: Sequence[str], ordered: np.ndarray) -> dict[str, np.ndarray]:
    """Consecutive parts of `ordered`, equally large but for one image, one per name, each sorted."""
    parts = np.array_split(ordered, len(names))
    return {name: np.sort(part) for name, part in zip(names, parts, strict=True)}


def deal_patients(
    names: Sequence[str], index: np.ndarray, patient: np.ndarray, shares: np.ndarray, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Whole patients to each site, at random, so that its share of the images is as near as patients allow.

    `patient` [len(index)] names each image's patient. Patients with most images go first, each to the site
    that lacks most.
    """
    _, which, sizes = np.unique(patient, return_inverse=True, return_counts=True)
    order = rng.permutation(len(sizes))
    order = order[np.argsort(-sizes[order], kind="stable")]
    lacking = shares * len(index)
    site_of = np.empty(len(sizes), dtype=np.int64)
    for who in order:
        site_of[who] = np.argmax(lacking)
        lacking[site_of[who]] -= sizes[who]
    return {name: np.sort(index[site_of[which] == k]) for k, name in enumerate(names)}


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
