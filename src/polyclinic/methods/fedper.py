"""FedPer (Arivazhagan et al. 2019): FedAvg of the first layers; the last ones stay at each site."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from polyclinic.errors import BadInput
from polyclinic.methods.fedavg import FedAvg
from polyclinic.methods.shared.method import Traits
from polyclinic.models import Backbone, split


class FedPer(FedAvg):
    name: Literal["fedper"] = "fedper"  # type: ignore[assignment]
    personal_after: str | None = Field(None, description="cut after which layers stay at sites; the last if not given")

    summary: ClassVar[str] = "FedAvg of the first layers; the head stays at each site"
    traits: ClassVar[Traits] = replace(FedAvg.traits, needs_cut=True, weights_stay=False)

    def local_names(self, model: Backbone, batch_norm: Literal["average", "local"]) -> frozenset[str]:
        return super().local_names(model, batch_norm) | self.head_names(model)

    def check_cuts(self, backbone: str, cuts: Sequence[str]) -> None:
        if self.personal_after is not None and self.personal_after not in cuts:
            raise BadInput(
                f"method.personal_after: {backbone} has no cut '{self.personal_after}'; choose one of {', '.join(cuts)}"
            )

    def head_names(self, model: Backbone) -> frozenset[str]:
        """Names of the weights behind the cut."""
        if not model.cuts:  # a study with such a network is refused
            return frozenset()
        return frozenset(split(model, self.personal_after or model.cuts[-1])[1].state_dict())
