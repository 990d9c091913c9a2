"""Ditto (Li et al. 2021): a common model by FedAvg, and beside it each site's own, held near the common one.

In a round a site trains the common model as in FedAvg and, with as many steps, its own model along
g + lambda (v - w_round). The own models are released, one of each site; they never leave it. With lambda = 0 they are
those of `standalone`, to the last bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field
from torch import nn

from polyclinic.federation.federation import Weights
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import operation
from polyclinic.federation.site import Site
from polyclinic.methods.shared import local_training
from polyclinic.methods.shared.local_training import Correct, FitSpec
from polyclinic.methods.shared.personal import PersonalFedAvg


class Ditto(PersonalFedAvg):
    name: Literal["ditto"] = "ditto"  # type: ignore[assignment]
    strength: float = Field(0.1, ge=0, description="lambda: how strongly own models are held near the common one")

    summary: ClassVar[str] = "FedAvg, and beside it a model of each site's own, held near the common one"

    @operation("weights", begins_round=True, together="train_together", summed="mean")
    def train(self, site: Site, weights: Weights) -> Parcel:
        parcel = self.train_common(site, weights)
        how = replace(self.own_spec(site), correct=self.pull_back(site, weights))
        own, _ = local_training.fit(site, _own_model(site), how)
        site.state.put("local", own)
        return parcel

    def train_together(self, sites: list[Site], weights: list[Weights]) -> list[Parcel]:
        parcels = self.train_common_together(sites, weights)
        pull_back = self.pull_back(sites[0], weights[0])
        starts = [_own_model(site) for site in sites]
        found = local_training.fit_together(sites, starts, self.own_spec, correct_for=lambda *_: pull_back)
        for site, (own, _) in zip(sites, found, strict=True):
            site.state.put("local", own)
        return parcels

    def own_spec(self, site: Site) -> FitSpec:
        """How a site trains its own model, but for what holds it near the common one."""
        return FitSpec(self.steps_at(site), replayed=self.replayed(site), optimizer_group="own optimizer")

    def pull_back(self, site: Site, weights: Weights) -> Correct:
        """Adds lambda (v - w_round) to the gradients of own models."""
        common = {name: tensor.to(site.trainer.device) for name, tensor in weights.items()}

        def correct(model: nn.Module) -> None:
            for name, parameter in model.named_parameters():
                if parameter.grad is not None and name in common:
                    parameter.grad.add_(parameter.detach() - common[name], alpha=self.strength)

        return correct


def _own_model(site: Site) -> Weights:
    return site.state.group("local") or site.trainer.initial_local
