"""IID partition: images assigned at random, equally many to each site."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field

from polyclinic.data.dataset import Dataset
from polyclinic.data.partitions.base import Address, Sites
from polyclinic.data.partitions.dealing import deal_patients, equal_slices, slices
from polyclinic.randomness import numpy_rng


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
