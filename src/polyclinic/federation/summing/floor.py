"""What a site's own people ask of a secure sum: how many sites at least, and how many of them may lie.

The coordinator chooses who takes part in a sum. What it cannot choose are the keys that the kits pin: only sites with
such a key count, each key once. Where `liars` sites work with the coordinator, a site is safe while

    liars < 2 t - n    no two sets of sites can both be agreed on, where n gave keys and any site opens with t or more
    liars <= t - 2     another honest site is in every sum that is opened
"""

from __future__ import annotations

from dataclasses import dataclass

from polyclinic.federation.policy import Policy
from polyclinic.federation.refusals import GateRefused
from polyclinic.federation.summing.settings import Federated

#: fewest sites of a secure sum, whatever a policy says: a sum of two shows each of them the other
FEWEST = 3


@dataclass(frozen=True)
class Floor:
    """The least that a site accepts."""

    min_sites: int = FEWEST
    liars: int = 0

    def threshold(self, settings: Federated, sites: int) -> int:
        """How many of so many sites must be left to open the site's secrets; GateRefused where no number protects it.

        Other sites open with the study's threshold, whatever this one wants, so that the first rule holds for that.
        """
        if sites < self.min_sites:
            raise GateRefused(
                f"a secure sum of {sites} sites was asked for, and the site's policy wants {self.min_sites} or more "
                "(min_sites)"
            )
        common = max(settings.fewest_of(sites), FEWEST)
        found = max(common, self.min_sites, self.liars + 2)
        if self.liars >= 2 * common - sites or found > sites:
            raise GateRefused(
                f"{self.liars} sites that work with the coordinator could open a secure sum of {sites} sites with "
                f"federation.threshold = {settings.threshold:.3g}, and the site's policy wants to be safe from so many "
                "(liars); raise federation.threshold, or take more sites"
            )
        return found


def floor_of(policy: Policy, pinned: int) -> Floor:
    """The floor of a site whose kit pins the keys of so many sites (0: a simulated one, whose keys are no secret)."""
    least = policy.min_sites if policy.min_sites is not None else max(FEWEST, pinned // 2 + 1)
    liars = policy.liars if policy.liars is not None else (max(1, pinned // 6) if pinned else 0)
    return Floor(least, liars)
