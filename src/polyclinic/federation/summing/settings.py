"""The `[federation]` table: how what the sites send is added up."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from polyclinic.settings import Settings

#: sites that fit into one sum of whole numbers: each site's share has 2^53, and 2^10 of these fit into 2^63
MOST_SITES = 1024


class Federated(Settings):
    """The `[federation]` table: how what the sites send is added up."""

    sum: Literal["float", "integer", "secure"] = Field(
        "float",
        description="how the sites' answers are added: float (each is seen by the coordinator), integer (the same in "
        "fixed point, modulo 2^64), or secure (integers under masks that cancel in the sum of all)",
    )
    bits: int = Field(
        24, ge=8, le=40, description="resolution of whole numbers: what a site adds is a multiple of 2^-bits"
    )
    threshold: float = Field(
        2 / 3,
        ge=0.5,
        lt=1,
        description="a secure sum is opened where more than this share of its sites is left; below that, nobody can",
    )
    liars: int = Field(
        0,
        ge=0,
        description="sites of a secure sum that may lie: where sites share the noise of differential privacy, the "
        "others' noise alone is enough",
    )

    label_sets: dict[str, tuple[str, ...]] = Field(
        {},
        description='classes that a site knows, where it does not know all: { north = ["healthy", "mild"] }; images of '
        "others are left out there, and the method must not unlearn them",
    )

    @property
    def in_whole_numbers(self) -> bool:
        return self.sum != "float"

    def fewest_of(self, sites: int) -> int:
        """How many of so many sites must be left for a secure sum to be opened."""
        return min(sites, math.floor(self.threshold * sites + 1e-9) + 1)
