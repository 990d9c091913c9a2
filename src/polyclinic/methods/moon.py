"""MOON (Li, He and Song 2021): FedAvg with a loss that keeps a site's representation near the common model's.

To the task's loss it adds mu times -log(e^(a / t) / (e^(a / t) + e^(b / t))), where a and b are cosine similarities of
an image's representation with that of the round's common model, and of the site's own model of its last round. The
representation is what comes before the network's last stage (the paper's networks have a projection head there). In a
site's first round its last model is the common one, and the added loss has no gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from polyclinic.federation.federation import Weights
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import operation
from polyclinic.federation.site import Site
from polyclinic.methods.fedavg import FedAvg
from polyclinic.methods.shared import local_training
from polyclinic.methods.shared.local_training import Fitted, StackedLosses
from polyclinic.methods.shared.traits import Traits
from polyclinic.models import Backbone, split
from polyclinic.training.stacking import StackedModel

if TYPE_CHECKING:
    from polyclinic.federation.collaborators import TrainerLike

Represent = Callable[[Tensor], Tensor]


class Moon(FedAvg):
    name: Literal["moon"] = "moon"  # type: ignore[assignment]
    mu: float = Field(1.0, ge=0, description="strength of the added loss; 0 is FedAvg")
    temperature: float = Field(0.5, gt=0, description="temperature of the added loss")

    summary: ClassVar[str] = "FedAvg that holds each site's representation near the common model's"
    traits: ClassVar[Traits] = replace(
        FedAvg.traits,
        takes_frozen_features=False,
        tasks=("classification", "regression"),
        needs_cut=True,
        private_networks=(),
        weights_stay=False,
        label_sets=False,
    )

    def privacy_obstacle(self) -> str | None:
        return (
            "method.name: 'moon' adds a loss of three networks, for which there are no private steps; choose fedprox, "
            "scaffold or fedavg under differential privacy"
        )

    @operation("weights", begins_round=True, together="train_together", summed="mean")
    def train(self, site: Site, weights: Weights) -> Parcel:
        common = local_training.assemble(site, weights)
        parcel = local_training.release(site, *self._fit(site, common))
        site.state.put("last", {**common, **site.state.group("local"), **parcel.tensors})
        return parcel

    def _fit(self, site: Site, common: Weights) -> Fitted:
        """Train one site from the whole model at the beginning of a round."""
        trainer = site.trainer
        last = site.state.group("last") or common
        references = [self._representation(site, one) for one in (common, last)]
        front, rest = split(trainer.load(common).train(), _last_cut(trainer.model))

        def objective(images: Tensor, targets: Tensor) -> Tensor:
            with trainer.autocast():
                representation = front(images)
                output = rest(representation)
            loss = trainer.loss(output, targets)
            if self.mu == 0:
                return loss
            to_common, to_last = (self._similarity(representation, refer(images)) for refer in references)
            return loss + self.mu * contrastive_loss(to_common, to_last, self.temperature)

        return local_training.fit(site, common, replace(self.fit_spec(site), objective=objective))

    def train_together(self, sites: list[Site], weights: list[Weights]) -> list[Parcel]:
        trainer = sites[0].trainer
        common = [local_training.assemble(site, own) for site, own in zip(sites, weights, strict=True)]
        last = [site.state.group("last") or own for site, own in zip(sites, common, strict=True)]

        def load(contrast: StackedContrast, places: Sequence[int]) -> None:
            contrast.load([common[place] for place in places], [last[place] for place in places])

        parcels = local_training.train_together(
            sites,
            weights,
            self.fit_spec,
            losses=StackedLosses(lambda members: StackedContrast(trainer, members, self.mu, self.temperature), load),
            alone=lambda place: self._fit(sites[place], common[place]),
        )
        for site, own, parcel in zip(sites, common, parcels, strict=True):
            site.state.put("last", {**own, **site.state.group("local"), **parcel.tensors})
        return parcels

    @staticmethod
    def _representation(site: Site, weights: Weights) -> Represent:
        """What a network with these weights, which stay as they are, makes of images; batch norm as in evaluation."""
        network = copy.deepcopy(site.trainer.load(weights)).eval()
        front, _ = split(network, _last_cut(network))

        @torch.no_grad()
        def represent(images: Tensor) -> Tensor:
            with site.trainer.autocast():
                return front(images)

        return represent

    @staticmethod
    def _similarity(first: Tensor, second: Tensor) -> Tensor:
        return F.cosine_similarity(first.flatten(1).float(), second.flatten(1).float())


class StackedContrast:
    """MOON's losses of several sites' networks in a stack, with both networks of each site that stay as they are."""

    def __init__(self, trainer: TrainerLike, members: int, mu: float, temperature: float) -> None:
        self.trainer, self.mu, self.temperature = trainer, mu, temperature
        self.references = [StackedModel(trainer.model, members) for _ in range(2)]
        for one in self.references:
            one.layout.eval()
        self.loss = vmap(lambda output, targets: trainer.task.loss(output, targets, trainer.target))
        self.contrast = vmap(self._contrast)

    def load(self, common: Sequence[Weights], last: Sequence[Weights]) -> None:
        for reference, weights in zip(self.references, (common, last), strict=True):
            reference.load(weights)

    def __call__(self, model: StackedModel, images: Tensor, targets: Tensor) -> Tensor:
        cut = _last_cut(self.trainer.model)
        with self.trainer.autocast():
            representation, output = model.through(cut, images)
            with torch.no_grad():
                others = [one.through(cut, images, whole=False)[0] for one in self.references]
        losses = self.loss(output.to(torch.promote_types(output.dtype, torch.float32)), targets)
        if self.mu == 0:
            return losses
        return losses + self.mu * self.contrast(representation, *others)

    def _contrast(self, own: Tensor, common: Tensor, last: Tensor) -> Tensor:
        to_common, to_last = (Moon._similarity(own, one) for one in (common, last))
        return contrastive_loss(to_common, to_last, self.temperature)


def contrastive_loss(to_common: Tensor, to_last: Tensor, temperature: float) -> Tensor:
    """The mean over images of -log of the share that the similarity to the common model has, from both [B]."""
    return F.softplus((to_last - to_common) / temperature).mean()


def _last_cut(model: Backbone) -> str:
    return model.cuts[-1]
