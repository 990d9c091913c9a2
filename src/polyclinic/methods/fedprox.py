"""FedProx (Li et al. 2020): FedAvg with a penalty, mu / 2 times the squared distance from the round's weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from polyclinic.federation.federation import Weights
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import Work, operation
from polyclinic.federation.site import Site
from polyclinic.methods.fedavg import FedAvg
from polyclinic.methods.shared import local_training
from polyclinic.training.plans import Correction, Fit


class FedProx(FedAvg):
    name: Literal["fedprox"] = "fedprox"  # type: ignore[assignment]
    mu: float = Field(0.001, ge=0, description="strength of the penalty; 0 is FedAvg")

    summary: ClassVar[str] = "FedAvg that holds each site near the round's common weights"

    @operation("weights", plan=Fit)
    def train(self, site: Site, weights: Weights) -> Work[Parcel]:
        pull_back = Correction(towards(self.mu), {"start": weights})
        return local_training.plan_train(site, weights, replace(self.fit_spec(site), correction=pull_back))


def towards(strength: float) -> Callable[..., tuple[Weights, Weights]]:
    """Adds the gradient of strength / 2 times the squared distance from `start`: strength * (w - start)."""

    def change(
        gradients: Weights, weights: Weights, given: Mapping[str, Weights], state: Weights
    ) -> tuple[Weights, Weights]:
        start = given["start"]
        pulled = {n: g.add(weights[n] - start[n], alpha=strength) for n, g in gradients.items() if n in start}
        return {**gradients, **pulled}, state

    return change
