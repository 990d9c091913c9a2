"""FedBN (Li et al. 2021): FedAvg in which every batch-norm layer, weights and statistics, stays at its site."""

from dataclasses import replace
from typing import ClassVar, Literal

from polyclinic.methods.fedavg import FedAvg
from polyclinic.methods.shared.method import Traits
from polyclinic.models import Backbone, norm_names


class FedBN(FedAvg):
    name: Literal["fedbn"] = "fedbn"  # type: ignore[assignment]

    summary: ClassVar[str] = "FedAvg that leaves batch-norm layers at the sites"
    traits: ClassVar[Traits] = replace(FedAvg.traits, batch_norm="local")

    def local_names(self, model: Backbone, batch_norm: Literal["average", "local"]) -> frozenset[str]:
        return frozenset(norm_names(model))
