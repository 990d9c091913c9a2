"""FedRep (Collins et al. 2021): as FedPer, but a site trains its head first, with the rest fixed, and then the rest."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import nn

from polyclinic.federation.federation import Weights
from polyclinic.federation.leaving.parcel import Parcel
from polyclinic.federation.operation import operation
from polyclinic.federation.site import Site
from polyclinic.methods.fedper import FedPer
from polyclinic.methods.shared import local_training
from polyclinic.methods.shared.local_training import FitSpec


class FedRep(FedPer):
    name: Literal["fedrep"] = "fedrep"  # type: ignore[assignment]
    head_epochs: int = Field(
        10,
        ge=0,
        description="passes over a site's images in a round that train the head alone, at first",
    )

    summary: ClassVar[str] = "FedPer that trains the head first and the common layers after it"

    @operation("weights", begins_round=True, summed="mean")
    def train(self, site: Site, weights: Weights) -> Parcel:
        head, replayed = self.head_names(site.trainer.model), self.replayed(site)
        start = local_training.assemble(site, weights)
        if self.head_epochs:
            start, _ = local_training.fit(
                site,
                start,
                FitSpec(
                    self.head_epochs * site.trainer.steps_in(site.data.train),
                    correct=lambda model: _only(model, head),
                    optimizer_group="head optimizer",
                    purpose="head batches",
                ),
            )
        rest = frozenset(start) - head
        trained, metadata = local_training.fit(
            site, start, FitSpec(self.steps_at(site), correct=lambda model: _only(model, rest), replayed=replayed)
        )
        return local_training.release(site, trained, metadata)


def _only(model: nn.Module, names: frozenset[str]) -> None:
    """Let a step change no other parameters than these."""
    for name, parameter in model.named_parameters():
        if name not in names:
            parameter.grad = None
