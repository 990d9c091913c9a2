"""FedRep (Collins et al. 2021): as FedPer, but a site trains its head first, with the rest fixed, and then the rest."""

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from polyclinic.methods.fedper import FedPer
from polyclinic.methods.shared import local_training
from polyclinic.methods.shared.method import Parcel, Site, Weights, Work, operation
from polyclinic.training.plans import Correction, Fit, FitSpec


class FedRep(FedPer):
    name: Literal["fedrep"] = "fedrep"  # type: ignore[assignment]
    head_epochs: int = Field(10, ge=0, description="passes over a site's images in a round that train the head, first")

    summary: ClassVar[str] = "FedPer that trains the head first and the common layers after it"

    @operation("weights", plan=Fit)
    def train(self, site: Site, weights: Weights) -> Work[Parcel]:
        head = self.head_names(site.trainer.model)
        start = local_training.assemble(site, weights)
        if self.head_epochs:
            steps = self.head_epochs * site.trainer.steps_in(site.data.train)
            spec = FitSpec(steps, correction=_only(head), optimizer_group="head optimizer", purpose="head batches")
            start = (yield Fit(site, start, spec)).weights
        rest = replace(self.fit_spec(site, weights), correction=_only(frozenset(start) - head))
        return local_training.release(site, (yield Fit(site, start, rest)))


def _only(names: frozenset[str]) -> Correction:
    """Lets a step change no other parameters than these."""
    return Correction(
        lambda gradients, weights, given, state: ({n: g for n, g in gradients.items() if n in names}, state)
    )
