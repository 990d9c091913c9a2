"""FedAvg beside which every site has a whole model of its own, which stays there."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from polyclinic.federation.federation import Weights
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.plan import Work
from polyclinic.federation.site import Site
from polyclinic.methods.fedavg import FedAvg
from polyclinic.methods.shared.traits import Traits
from polyclinic.training import private
from polyclinic.training.plans import Fit

if TYPE_CHECKING:
    from polyclinic.models import Backbone


class PersonalFedAvg(FedAvg):
    #: the common model's batch-norm statistics are averaged; each own model has its own
    traits: ClassVar[Traits] = replace(FedAvg.traits, batch_norm="average", weights_stay=False)

    def local_names(self, model: Backbone, batch_norm: Literal["average", "local"]) -> frozenset[str]:
        """All of them: each site has a model of its own, beside the common one."""
        return frozenset(model.state_dict())

    def train_common(self, site: Site, weights: Weights) -> Work[Parcel]:
        """FedAvg's training of the common model: all of it leaves, and the site's own model is not touched."""
        fitted = yield Fit(site, weights, self.fit_spec(site))
        return Parcel("weights", fitted.weights, fitted.metadata, private.record_of(site, "classifier"))
