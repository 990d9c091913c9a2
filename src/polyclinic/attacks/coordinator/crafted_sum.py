"""Crafted layers against a secure sum (in the spirit of MedLeak, Shi et al. 2025, and LOKI, Zhao et al. 2024).

A secure sum shows the coordinator only the sum of all sites' updates. The bins of an imprinted layer are in that sum,
too. With `separate`, each site gets weights in which only rows of its own are alive: the sum is then nothing but the
sites' updates side by side, and each image comes back with the name of its site. Otherwise all sites get the same
weights and share the bins.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from polyclinic.attacks.coordinator.crafting import CoordinatorAttack, Update, dense_layer
from polyclinic.attacks.coordinator.imprint import imprint, read_bins
from polyclinic.errors import BadInput


class CraftedSum(CoordinatorAttack):
    """`attack.craft(model, public, site)` for each site; then `attack.recover(total, crafted, public, site)`."""

    name: Literal["crafted-sum"] = "crafted-sum"
    sites: int = Field(2, ge=1, description="how many sites are in the sum")
    separate: bool = Field(True, description="each site gets weights of its own; otherwise all get the same")
    strength: float = Field(1.0, gt=0, le=1, description="the share of a site's rows that are bins")

    @property
    def assumptions(self) -> str:
        different = "each site may get other weights, " if self.separate else ""
        return f"{different}only the sum of the sites' updates is seen, without clipping or noise"

    def rows(self, model: nn.Module, site: int) -> range:
        """The rows of the dense layer that are bins of this site."""
        if not 0 <= site < self.sites:
            raise BadInput(f"attack: site {site} is not one of 0 to {self.sites - 1}")
        _, layer = dense_layer(model)
        share = layer.out_features // self.sites if self.separate else layer.out_features
        begin = share * site if self.separate else 0
        return range(begin, begin + max(2, round(self.strength * share)))

    def craft(self, model: nn.Module, public: Tensor, site: int = 0) -> nn.Module:
        """A copy for this site, with bins over the range of the attacker's own images [M, C, H, W]."""
        return imprint(model, public, self.rows(model, site))

    def recover(self, update: Update, crafted: nn.Module, public: Tensor, site: int = 0) -> Tensor:
        """The images [K, C, H, W] that a site's bins hold, from the sum (or the mean) of all sites' updates."""
        return read_bins(update, crafted, public, self.rows(crafted, site))
