"""Fine-tuning: a common model by FedAvg; at the end each site trains the selected one a few steps for itself.

The fine-tuned models are released, one of each site; they never leave it. With no steps they are FedAvg's.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from polyclinic.federation.federation import Federation, Weights
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import operation
from polyclinic.federation.site import Site
from polyclinic.methods.shared import local_training
from polyclinic.methods.shared.local_training import FitSpec
from polyclinic.methods.shared.personal import PersonalFedAvg


class FineTune(PersonalFedAvg):
    name: Literal["finetune"] = "finetune"  # type: ignore[assignment]
    tuning_steps: int = Field(20, ge=0, description="steps of each site from the common model; 0 is FedAvg")

    summary: ClassVar[str] = "FedAvg, then a few steps of each site for itself"

    def run(self, federation: Federation) -> Weights:
        last = super().run(federation)
        best = federation.observer.best_weights
        federation.ask_all("tune", weights=last if best is None else best)
        return last

    @operation("weights", begins_round=True, together="train_together", summed="mean")
    def train(self, site: Site, weights: Weights) -> Parcel:
        return self.train_common(site, weights)

    def train_together(self, sites: list[Site], weights: list[Weights]) -> list[Parcel]:
        return self.train_common_together(sites, weights)

    @operation(together="tune_together")
    def tune(self, site: Site, weights: Weights) -> None:
        """Train the common model for the site alone; it is the site's best, whatever round the common one is of."""
        own = local_training.fit(site, weights, self.tuning_spec(site))[0] if self.tuning_steps else dict(weights)
        _keep(site, own)

    def tune_together(self, sites: list[Site], weights: list[Weights]) -> list[None]:
        models = [dict(own) for own in weights]
        if self.tuning_steps:
            models = [own for own, _ in local_training.fit_together(sites, weights, self.tuning_spec)]
        for site, own in zip(sites, models, strict=True):
            _keep(site, own)
        return [None for _ in sites]

    def tuning_spec(self, site: Site) -> FitSpec:
        return FitSpec(self.tuning_steps, optimizer_group="own optimizer", purpose="tuning batches")


def _keep(site: Site, own: Weights) -> None:
    for group in ("local", "best"):
        site.state.put(group, own)
