"""The `[federation]` table, how what the sites send is added up; and what a site's own people ask of a secure sum.

The coordinator chooses who takes part in a sum. What it cannot choose are the keys that the kits pin: only sites with
such a key count, each key once. Where `liars` sites work with the coordinator, a site is safe while

    liars < 2 t - n    no two sets of sites can both be agreed on, where n gave keys and any site opens with t or more
    liars <= t - 2     another honest site is in every sum that is opened
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from polyclinic.federation.call import GateRefused
from polyclinic.federation.policy import Policy
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
    bits: int = Field(24, ge=8, le=40, description="resolution: what a site adds is a multiple of 2^-bits")
    threshold: float = Field(2 / 3, ge=0.5, lt=1, description="a secure sum opens where more than this share is left")
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

    def fewest_of(self, sites: int) -> int:
        """How many of so many sites must be left for a secure sum to be opened."""
        return min(sites, math.floor(self.threshold * sites + 1e-9) + 1)


#: the operation that scores a model and tells each site's figures, and those whose answers are added up in a secure
#: sum: in a round, and once the run is over
EVALUATE, ADD_SCORES, ADD_FINAL_SCORES = "evaluate", "add_scores", "add_final_scores"


def added_up(study: Any) -> dict[str, str]:
    """What of the operations of a study (`StudyLike`) is added up, and how: where sums are secure, scores are, too,
    unless each site has noise of its own on them."""
    summed = dict(getattr(study.method, "SUMMED", {}))
    noised = study.privacy is not None and study.privacy.score_noise is not None
    secure = study.federation.sum == "secure" and not noised
    return summed | (dict.fromkeys((ADD_SCORES, ADD_FINAL_SCORES), "secure sum") if secure else {})


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
