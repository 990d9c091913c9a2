"""Dirichlet label skew: each class goes to the sites in proportions drawn from a Dirichlet distribution."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from polyclinic.data.dataset import Dataset
from polyclinic.data.partitions.base import Address, Sites
from polyclinic.data.partitions.strata import StratumShares, label_strata
from polyclinic.errors import BadInput
from polyclinic.randomness import numpy_rng

TRIES = 200


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
