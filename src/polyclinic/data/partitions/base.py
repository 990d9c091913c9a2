"""The base class of partitions: the `[sites]` table of a study."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Protocol

import numpy as np
from pydantic import Field, model_validator

from polyclinic.data.dataset import Dataset
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
        """How to spread images over the sites, learnt from the training images at `train` only."""
