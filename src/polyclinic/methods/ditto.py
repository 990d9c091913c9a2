"""Ditto (Li et al. 2021): a common model by FedAvg, and beside it each site's own, held near the common one.

In a round a site trains the common model as in FedAvg and, with as many steps, its own model along
g + lambda (v - w_round). The own models are released, one of each site; they never leave it. With lambda = 0 they are
those of `standalone`, to the last bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from polyclinic.federation.federation import Weights
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import operation
from polyclinic.federation.plan import Work
from polyclinic.federation.site import Site
from polyclinic.methods.fedprox import towards
from polyclinic.methods.shared.personal import PersonalFedAvg
from polyclinic.training.plans import Correction, Fit


class Ditto(PersonalFedAvg):
    name: Literal["ditto"] = "ditto"  # type: ignore[assignment]
    strength: float = Field(0.1, ge=0, description="lambda: how strongly own models are held near the common one")

    summary: ClassVar[str] = "FedAvg, and beside it a model of each site's own, held near the common one"

    @operation("weights", plan=Fit)
    def train(self, site: Site, weights: Weights) -> Work[Parcel]:
        parcel = yield from self.train_common(site, weights)
        spec = replace(
            self.fit_spec(site),
            optimizer_group="own optimizer",
            correction=Correction(towards(self.strength), {"start": weights}),
        )
        fitted = yield Fit(site, site.state.group("local") or site.trainer.initial_local, spec)
        site.state.put("local", fitted.weights)
        return parcel
