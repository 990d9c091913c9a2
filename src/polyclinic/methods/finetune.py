"""Fine-tuning: a common model by FedAvg; at the end each site trains the selected one a few steps for itself.

The fine-tuned models are released, one of each site; they never leave it. With no steps they are FedAvg's.
"""

from typing import ClassVar, Literal

from pydantic import Field

from polyclinic.methods.ditto import PersonalFedAvg
from polyclinic.methods.shared.method import Federation, Site, Weights, Work, operation
from polyclinic.training.plans import Fit, FitSpec


class FineTune(PersonalFedAvg):
    name: Literal["finetune"] = "finetune"  # type: ignore[assignment]
    tuning_steps: int = Field(20, ge=0, description="steps of each site from the common model; 0 is FedAvg")

    summary: ClassVar[str] = "FedAvg, then a few steps of each site for itself"

    def run(self, federation: Federation) -> Weights:
        last = super().run(federation)
        best = federation.observer.best_weights
        federation.ask_all("tune", weights=last if best is None else best)
        return last

    @operation(plan=Fit)
    def tune(self, site: Site, weights: Weights) -> Work[None]:
        """Train the common model for the site alone; it is the site's best, whatever round the common one is of."""
        own = dict(weights)
        if self.tuning_steps:
            spec = FitSpec(self.tuning_steps, optimizer_group="own optimizer", purpose="tuning batches")
            own = (yield Fit(site, weights, spec)).weights
        for group in ("local", "best"):
            site.state.put(group, own)
