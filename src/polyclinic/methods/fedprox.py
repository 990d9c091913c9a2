"""FedProx (Li et al. 2020): FedAvg with a penalty, mu / 2 times the squared distance from the round's weights."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from polyclinic.methods.fedavg import FedAvg
from polyclinic.methods.shared.method import Site, Weights
from polyclinic.training.plans import Correction, FitSpec


class FedProx(FedAvg):
    name: Literal["fedprox"] = "fedprox"  # type: ignore[assignment]
    mu: float = Field(0.001, ge=0, description="strength of the penalty; 0 is FedAvg")

    summary: ClassVar[str] = "FedAvg that holds each site near the round's common weights"

    def fit_spec(self, site: Site, weights: Weights) -> FitSpec:
        pull_back = Correction(towards(self.mu), {"start": weights})
        return replace(super().fit_spec(site, weights), correction=pull_back)


def towards(strength: float) -> Callable[..., tuple[Weights, Weights]]:
    """Adds the gradient of strength / 2 times the squared distance from `start`: strength * (w - start)."""

    def change(
        gradients: Weights, weights: Weights, given: Mapping[str, Weights], state: Weights
    ) -> tuple[Weights, Weights]:
        start = given["start"]
        pulled = {n: g.add(weights[n] - start[n], alpha=strength) for n, g in gradients.items() if n in start}
        return {**gradients, **pulled}, state

    return change
