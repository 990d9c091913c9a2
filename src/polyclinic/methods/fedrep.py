"""FedRep (Collins et al. 2021): as FedPer, but a site trains its head first, with the rest fixed, and then the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field
from torch import nn

from polyclinic.federation.federation import Weights
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import operation
from polyclinic.federation.site import Site
from polyclinic.methods.fedper import FedPer
from polyclinic.methods.shared import local_training
from polyclinic.methods.shared.local_training import Correct, FitSpec


class FedRep(FedPer):
    name: Literal["fedrep"] = "fedrep"  # type: ignore[assignment]
    head_epochs: int = Field(
        10,
        ge=0,
        description="passes over a site's images in a round that train the head alone, at first",
    )

    summary: ClassVar[str] = "FedPer that trains the head first and the common layers after it"

    @operation("weights", begins_round=True, together="train_together", summed="mean")
    def train(self, site: Site, weights: Weights) -> Parcel:
        head = self.head_names(site.trainer.model)
        start = local_training.assemble(site, weights)
        if self.head_epochs:
            start, _ = local_training.fit(site, start, replace(self.head_spec(site), correct=_only(head)))
        rest = replace(self.fit_spec(site), correct=_only(frozenset(start) - head))
        return local_training.release(site, *local_training.fit(site, start, rest))

    def train_together(self, sites: list[Site], weights: list[Weights]) -> list[Parcel]:
        head = self.head_names(sites[0].trainer.model)
        starts = [local_training.assemble(site, own) for site, own in zip(sites, weights, strict=True)]
        if self.head_epochs:
            heads = local_training.fit_together(sites, starts, self.head_spec, correct_for=lambda *_: _only(head))
            starts = [trained for trained, _ in heads]
        rest = _only(frozenset(starts[0]) - head)
        found = local_training.fit_together(sites, starts, self.fit_spec, correct_for=lambda *_: rest)
        return [local_training.release(site, *one) for site, one in zip(sites, found, strict=True)]

    def head_spec(self, site: Site) -> FitSpec:
        """How a site trains its head, but for what keeps the rest as it is."""
        steps = self.head_epochs * site.trainer.steps_in(site.data.train)
        return FitSpec(steps, optimizer_group="head optimizer", purpose="head batches")


def _only(names: frozenset[str]) -> Correct:
    """Lets a step change no other parameters than these."""

    def correct(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if name not in names:
                parameter.grad = None

    return correct
