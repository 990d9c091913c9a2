"""Ditto (Li et al. 2021): a common model by FedAvg, and beside it each site's own, held near the common one.

In a round a site trains the common model as in FedAvg and, with as many steps, its own model along
g + lambda (v - w_round). The own models are released, one of each site; they never leave it. With lambda = 0 they are
those of `standalone`, to the last bit.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import nn

from polyclinic.federation.federation import Weights
from polyclinic.federation.leaving.parcel import Parcel
from polyclinic.federation.operation import operation
from polyclinic.federation.site import Site
from polyclinic.methods.shared import local_training
from polyclinic.methods.shared.local_training import FitSpec
from polyclinic.methods.shared.personal import PersonalFedAvg


class Ditto(PersonalFedAvg):
    name: Literal["ditto"] = "ditto"  # type: ignore[assignment]
    strength: float = Field(0.1, ge=0, description="lambda: how strongly own models are held near the common one")

    summary: ClassVar[str] = "FedAvg, and beside it a model of each site's own, held near the common one"

    @operation("weights", begins_round=True, summed="mean")
    def train(self, site: Site, weights: Weights) -> Parcel:
        parcel = self.train_common(site, weights)
        common = {name: tensor.to(site.trainer.device) for name, tensor in weights.items()}

        def pull_back(model: nn.Module) -> None:
            for name, parameter in model.named_parameters():
                if parameter.grad is not None and name in common:
                    parameter.grad.add_(parameter.detach() - common[name], alpha=self.strength)

        start = site.state.group("local") or site.trainer.initial_local
        own, _ = local_training.fit(
            site,
            start,
            FitSpec(
                self.steps_at(site),
                correct=pull_back,
                replayed=self.replayed(site),
                optimizer_group="own optimizer",
            ),
        )
        site.state.put("local", own)
        return parcel
