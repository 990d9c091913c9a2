"""The `[audit]` table of a study: what sites keep for an audit, and what the audit grants an attacker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from pydantic import Field

from polyclinic.attacks.attack import RECEIVER, Capability, ThreatModel
from polyclinic.attacks.gradient_inversion.settings import GradientInversion
from polyclinic.settings import Settings

#: what a grid compares
DefenceName = Literal["clip-and-noise", "sparsify", "prune", "quantise", "secure-sum", "deeper-cut"]


class Audit(Settings):
    """Without this table sites keep nothing, and a run cannot be audited."""

    keep_parcels: int = Field(
        1, ge=0, le=1000, description="releases of each operation that a site keeps at random, with its first and last"
    )
    threat_model: tuple[Capability, ...] = Field(
        tuple(capability for capability in Capability if capability in RECEIVER),
        description="what the attacker sees, holds and knows: " + ", ".join(Capability),
    )

    own_images: str = Field(
        "auto",
        description="the attacker's own images, on which it trains decoders: other-sites (their held-out images), "
        "held-out (half of the site's own), phantoms, a source of data by its name, or none; auto takes other sites' "
        "where they are at hand",
    )
    gradient_inversion: GradientInversion | None = Field(
        None,
        description="settings of the search for images behind gradients and weights; if not given, the attack of "
        "Geiping et al. with as many steps as the audit's budget has",
    )
    secure_sum: bool = Field(
        False,
        description="attack only the mean of all sites' gradients or weights of a round, all that a secure sum reveals",
    )
    defences: tuple[DefenceName, ...] = Field(
        get_args(DefenceName),
        description="what `polyclinic audit --grid` tries, where it fits: " + ", ".join(get_args(DefenceName)),
    )

    @property
    def threat(self) -> ThreatModel:
        granted = frozenset(self.threat_model)
        return ThreatModel(granted=granted - {Capability.SIMILAR_IMAGES} if self.own_images == "none" else granted)


@dataclass(frozen=True)
class Effort:
    """How much an audit tries (`--budget quick|standard|thorough`).

    Of each operation, `sites` sites with `releases` releases each are attacked (0: all).

    `images`: searched for in one update, or inverted in one parcel; `update_steps`, `latent_steps` and
    `projection_steps`: of the searches; `candidates`: images asked about, members and held-out ones each.
    """

    sites: int
    releases: int
    images: int
    update_steps: int
    latent_steps: int
    projected: int
    projection_steps: int
    candidates: int
    references: int = 4  #: reference models of membership inference, each a training of its own
    generator_steps: int = 100  #: of a reference generator, at most
    minutes: float = 0  #: attacks that would begin later are not tried; 0: as long as it takes


EFFORTS = {
    "quick": Effort(
        sites=1,
        releases=2,
        images=8,
        update_steps=200,
        latent_steps=300,
        projected=24,
        projection_steps=60,
        candidates=150,
        minutes=10,
    ),
    "standard": Effort(
        sites=0,
        releases=0,
        images=16,
        update_steps=1000,
        latent_steps=1000,
        projected=64,
        projection_steps=200,
        candidates=500,
        references=8,
        generator_steps=1000,
        minutes=120,
    ),
    "thorough": Effort(
        sites=0,
        releases=0,
        images=32,
        update_steps=5000,
        latent_steps=5000,
        projected=200,
        projection_steps=1000,
        candidates=2000,
        references=16,
        generator_steps=5000,
    ),
}
