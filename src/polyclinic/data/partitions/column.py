"""Partition by a column: a site for each value of a column, such as the institution."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from polyclinic.data.dataset import Dataset
from polyclinic.data.partitions.base import Address, Sites
from polyclinic.errors import BadInput
from polyclinic.settings import nearest


@dataclass(frozen=True)
class ByColumn:
    """`recorded` maps a site's name to what the dataset calls it."""

    recorded: dict[str, str]

    def assign(self, dataset: Dataset, index: np.ndarray, address: Address) -> dict[str, np.ndarray]:
        assert dataset.site is not None
        found = dataset.site[index].astype(str)
        return {name: np.sort(index[found == value]) for name, value in self.recorded.items()}


class Column(Sites):
    """Every image stays where it was taken; a patient seen at two institutions is at both.

    `names` keeps only these institutions, in this order; `rename` gives some of them another name.
    """

    partition: Literal["column"] = Field(
        "column", description="a site for each value of the column (or array) that data.site names"
    )
    rename: dict[str, str] = Field(default={}, description="new names of sites, by the recorded ones")

    finds_sites: ClassVar[bool] = True

    @model_validator(mode="after")
    def _sites_are_found_not_counted(self) -> Column:
        if self.count is not None:
            raise ValueError(
                f'remove the line count = {self.count}; with partition = "column" the data say how many sites there '
                "are (sites.names keeps some of them)"
            )
        return self

    def left_out(self, dataset: Dataset) -> dict[str, int]:
        if dataset.site is None or self.names is None:
            return {}
        found = Counter(str(site) for site in dataset.site)
        return {name: count for name, count in sorted(found.items()) if name not in self.names}

    def plan(self, dataset: Dataset, train: np.ndarray, address: Address) -> ByColumn:
        if dataset.site is None:
            raise BadInput(
                "sites.partition: 'column' needs a site for every image, and this source has none; "
                "name a site array or column in [data], or choose another partition"
            )
        known = sorted({str(site) for site in dataset.site})
        chosen = self.names or tuple(known)
        for name in (*chosen, *self.rename):
            if name not in known:
                raise BadInput(f"sites.names: no site '{name}'{nearest(name, known)}; there are {', '.join(known)}")
        recorded = {self.rename.get(name, name): name for name in chosen}
        if len(recorded) < len(chosen):
            raise BadInput("sites.rename: two sites would have the same name; give each its own")
        return ByColumn(recorded)
