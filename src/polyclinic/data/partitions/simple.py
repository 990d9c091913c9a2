"""Partitions at random (iid, quantity, dirichlet) and by a column, such as the institution."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from polyclinic.data.dataset import Dataset
from polyclinic.data.partitions.base import (
    Address,
    Sites,
    StratumShares,
    deal_patients,
    equal_slices,
    label_strata,
    slices,
)
from polyclinic.errors import BadInput
from polyclinic.randomness import numpy_rng
from polyclinic.settings import nearest


@dataclass(frozen=True)
class RandomShares:
    """Images at random, in the given shares; whole patients where the dataset names them."""

    names: tuple[str, ...]
    shares: np.ndarray

    def assign(self, dataset: Dataset, index: np.ndarray, address: Address) -> dict[str, np.ndarray]:
        rng = numpy_rng(*address)
        if dataset.patient is not None:
            return deal_patients(self.names, index, dataset.patient[index], self.shares, rng)
        if np.allclose(self.shares, 1 / len(self.names)):
            return equal_slices(self.names, rng.permutation(index))
        return slices(self.names, rng.permutation(index), self.shares)


class Iid(Sites):
    """Every site has the same distribution and size; images of one patient stay together."""

    partition: Literal["iid"] = Field("iid", description="at random, equally many images at each site")

    def plan(self, dataset: Dataset, train: np.ndarray, address: Address) -> RandomShares:
        names = self.site_names()
        return RandomShares(names, np.full(len(names), 1 / len(names)))


class Quantity(Sites):
    """Images at random, in unequal shares; images of one patient stay together.

    Either `shares`, one number per site (they are scaled to sum to 1), or a power law: the k-th site has
    1 / k ** power of the first site's images.
    """

    partition: Literal["quantity"] = Field("quantity", description="sites of different sizes, labels alike")
    power: float = Field(1.0, ge=0, le=10, description="exponent of the sizes' power law; 0 makes them equal")
    shares: tuple[float, ...] | None = Field(None, description="relative sizes, instead of a power law")

    @model_validator(mode="after")
    def _a_share_for_every_site(self) -> Quantity:
        if self.shares is None:
            return self
        if len(self.shares) != len(self.site_names()):
            raise ValueError(f"shares has {len(self.shares)} numbers for {len(self.site_names())} sites")
        if min(self.shares) <= 0:
            raise ValueError("shares must all be above 0")
        return self

    def plan(self, dataset: Dataset, train: np.ndarray, address: Address) -> RandomShares:
        names = self.site_names()
        sizes = np.array(self.shares) if self.shares else 1 / np.arange(1, len(names) + 1) ** self.power
        return RandomShares(names, sizes / sizes.sum())


TRIES = 200  #: draws until every site has min_size images


class Dirichlet(Sites):
    """Small `alpha`: a class lies at few sites; large `alpha`: evenly everywhere. Sizes differ, too.

    Regression labels are divided by tenths of their distribution. Images of one patient may come to several
    sites; they never cross a split.
    """

    partition: Literal["dirichlet"] = Field("dirichlet", description="each class in Dirichlet shares")
    alpha: float = Field(0.5, gt=0, le=1e6, description="concentration: the smaller, the more sites differ")
    min_size: int = Field(
        10, ge=1, description="fewest training images of a site; shares are drawn until all have them"
    )

    def plan(self, dataset: Dataset, train: np.ndarray, address: Address) -> StratumShares:
        names, rng = self.site_names(), numpy_rng(*address)
        strata_of, strata = label_strata(dataset.labels[train], len(dataset.classes))
        for _ in range(TRIES):
            shares = rng.dirichlet(np.full(len(names), self.alpha), size=strata)
            plan = StratumShares(names, strata_of, shares)
            if min(map(len, plan.assign(dataset, train, (*address, "train")).values())) >= self.min_size:
                return plan
        raise BadInput(
            f"sites.min_size: no draw of {TRIES} left every one of {len(names)} sites {self.min_size} of "
            f"{len(train)} training images at alpha = {self.alpha:g}; lower it or raise sites.alpha"
        )


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
