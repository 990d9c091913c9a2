"""Ditto (Li et al. 2021): a common model by FedAvg, and beside it each site's own, held near the common one.

In a round a site trains the common model as in FedAvg and, with as many steps, its own model along
g + lambda (v - w_round). The own models are released, one of each site; they never leave it. With lambda = 0 they are
those of `standalone`, to the last bit.
"""

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from polyclinic.methods.fedavg import FedAvg
from polyclinic.methods.fedprox import towards
from polyclinic.methods.shared.method import Parcel, Site, Traits, Weights, Work, operation
from polyclinic.models import Backbone
from polyclinic.training import private
from polyclinic.training.plans import Correction, Fit


class PersonalFedAvg(FedAvg):
    """FedAvg beside which every site has a whole model of its own, which stays there (Ditto, finetune)."""

    #: the common model's batch-norm statistics are averaged; each own model has its own
    traits: ClassVar[Traits] = replace(FedAvg.traits, batch_norm="average", weights_stay=False)

    def local_names(self, model: Backbone, batch_norm: Literal["average", "local"]) -> frozenset[str]:
        """All of them: each site has a model of its own, beside the common one."""
        return frozenset(model.state_dict())

    @operation("weights", plan=Fit)
    def train(self, site: Site, weights: Weights) -> Work[Parcel]:
        """FedAvg's training of the common model: all of it leaves, and the site's own model is not touched."""
        fitted = yield Fit(site, weights, self.fit_spec(site, weights))
        return Parcel("weights", fitted.weights, fitted.metadata, private.record_of(site, "classifier"))


class Ditto(PersonalFedAvg):
    name: Literal["ditto"] = "ditto"  # type: ignore[assignment]
    strength: float = Field(0.1, ge=0, description="lambda: how strongly own models are held near the common one")

    summary: ClassVar[str] = "FedAvg, and beside it a model of each site's own, held near the common one"

    @operation("weights", plan=Fit)
    def train(self, site: Site, weights: Weights) -> Work[Parcel]:
        parcel = yield from super().train(site, weights)
        near = Correction(towards(self.strength), {"start": weights})
        spec = replace(self.fit_spec(site, weights), optimizer_group="own optimizer", correction=near)
        fitted = yield Fit(site, site.state.group("local") or site.trainer.initial_local, spec)
        site.state.put("local", fitted.weights)
        return parcel
