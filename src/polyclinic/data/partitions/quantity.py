"""Quantity skew: sites of different sizes with the same label distribution."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from polyclinic.data.dataset import Dataset
from polyclinic.data.partitions.base import Address, Sites
from polyclinic.data.partitions.iid import RandomShares


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
