"""MOON (Li, He and Song 2021): FedAvg with a loss that keeps a site's representation near the common model's.

To the task's loss it adds mu times -log(e^(a / t) / (e^(a / t) + e^(b / t))), where a and b are cosine similarities of
an image's representation with that of the round's common model, and of the site's own model of its last round. The
representation is what comes before the network's last stage (the paper's networks have a projection head there). In a
site's first round its last model is the common one, and the added loss has no gradient.
"""

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from polyclinic.methods.fedavg import FedAvg
from polyclinic.methods.shared import local_training
from polyclinic.methods.shared.method import Parcel, Site, Traits, Weights, Work, operation
from polyclinic.training.plans import Fit, Reference


class Moon(FedAvg):
    name: Literal["moon"] = "moon"  # type: ignore[assignment]
    mu: float = Field(1.0, ge=0, description="strength of the added loss; 0 is FedAvg")
    temperature: float = Field(0.5, gt=0, description="temperature of the added loss")

    summary: ClassVar[str] = "FedAvg that holds each site's representation near the common model's"
    no_privacy: ClassVar[str] = (
        "adds a loss of three networks, for which there are no private steps; choose fedprox, scaffold or fedavg"
    )
    traits: ClassVar[Traits] = replace(
        FedAvg.traits,
        takes_frozen_features=False,
        tasks=("classification", "regression"),
        needs_cut=True,
        private_networks=(),
        weights_stay=False,
        label_sets=False,
    )

    @operation("weights", plan=Fit)
    def train(self, site: Site, weights: Weights) -> Work[Parcel]:
        common = local_training.assemble(site, weights)
        contrast = Reference(site.trainer.model.cuts[-1], [common, site.state.group("last") or common], self._contrast)
        spec = replace(self.fit_spec(site, weights), reference=contrast if self.mu else None)
        parcel = local_training.release(site, (yield Fit(site, common, spec)))
        site.state.put("last", {**common, **site.state.group("local"), **parcel.tensors})
        return parcel

    def _contrast(self, own: Tensor, common: Tensor, last: Tensor) -> Tensor:
        to_common, to_last = (
            F.cosine_similarity(own.flatten(1).float(), one.flatten(1).float()) for one in (common, last)
        )
        # -log of the share that the similarity to the common model has
        return self.mu * F.softplus((to_last - to_common) / self.temperature).mean()
