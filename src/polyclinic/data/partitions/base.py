"""What every partition is: the `[sites]` table of a study, and a plan made from the training images."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from pydantic import Field, model_validator

from polyclinic.data.dataset import Dataset
from polyclinic.errors import BadInput
from polyclinic.settings import Settings

Address = tuple[str | int, ...]


class Plan(Protocol):
    """What a partition learnt from the training images; it spreads any split in the same way."""

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

    @model_validator(mode="after")
    def _names_or_count(self) -> Sites:
        if (self.names is None) == (self.count is None):
            raise ValueError("give either names or count, not both and not neither")
        return self._distinct_names()

    def _distinct_names(self) -> Sites:
        if self.names is not None and (not self.names or len(set(self.names)) < len(self.names)):
            raise ValueError("names must be at least one, and all different")
        return self

    def site_names(self) -> tuple[str, ...]:
        """Names of the sites, in order."""
        return (
            self.names if self.names is not None else tuple(f"site-{k + 1}" for k in range(self.count or 0))
        )

    @abstractmethod
    def plan(self, dataset: Dataset, train: np.ndarray, address: Address) -> Plan:
        """How to spread images over the sites, learnt from the training images at `train` only."""


def spread(
    sites: Sites, dataset: Dataset, splits: Mapping[str, np.ndarray], seed: int
) -> dict[str, dict[str, np.ndarray]]:
    """Indices into `dataset` of each site's part of each split: `result[site][split]`, sites in order.

    `splits` holds the indices of "train" and of any other split. The plan is made from "train"; every other split
    is spread by the same plan, so each site's validation and test images follow its own training distribution and the
    pooled test set is the union of the sites' test sets.
    """
    plan = sites.plan(dataset, np.asarray(splits["train"]), (seed, "partition"))
    parts: dict[str, dict[str, np.ndarray]] = {}
    for split, index in splits.items():
        for site, part in plan.assign(dataset, np.asarray(index), (seed, "partition", split)).items():
            parts.setdefault(site, {})[split] = part
    empty = [site for site, part in parts.items() if len(part["train"]) == 0]
    if empty:
        raise BadInput(
            f"sites.partition: '{sites.partition}' leaves {', '.join(empty)} without training images; "
            "take fewer sites or more images"
        )
    return parts
