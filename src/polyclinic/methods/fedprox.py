"""FedProx (Li et al. 2020): FedAvg with a penalty, mu / 2 times the squared distance from the round's weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field
from torch import nn

from polyclinic.federation.federation import Weights
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import operation
from polyclinic.federation.site import Site
from polyclinic.methods.fedavg import FedAvg
from polyclinic.methods.shared import local_training


class FedProx(FedAvg):
    name: Literal["fedprox"] = "fedprox"  # type: ignore[assignment]
    mu: float = Field(0.001, ge=0, description="strength of the penalty; 0 is FedAvg")

    summary: ClassVar[str] = "FedAvg that holds each site near the round's common weights"

    @operation("weights", begins_round=True, together="train_together", summed="mean")
    def train(self, site: Site, weights: Weights) -> Parcel:
        pull_back = self._pull_back(site, weights)
        return local_training.train(site, weights, replace(self.fit_spec(site), correct=pull_back))

    def train_together(self, sites: list[Site], weights: list[Weights]) -> list[Parcel]:
        pull_back = self._pull_back(sites[0], weights[0])  # all sites have the round's weights
        return local_training.train_together(sites, weights, self.fit_spec, correct_for=lambda *_: pull_back)

    def _pull_back(self, site: Site, weights: Weights) -> Callable[[nn.Module], None]:
        start = {name: tensor.to(site.trainer.device) for name, tensor in weights.items()}

        def pull_back(model: nn.Module) -> None:
            # the gradient of the penalty, written out: mu * (w - w_start)
            for name, parameter in model.named_parameters():
                if parameter.grad is not None and name in start:
                    parameter.grad.add_(parameter.detach() - start[name], alpha=self.mu)

        return pull_back
