"""FedDyn (Acar et al. 2021, Algorithm 1): each site's loss gets a linear and a quadratic term that follow the rounds.

A site steps along g - h_k + alpha (w - w_round), then h_k = h_k - alpha (w_k - w_round). The coordinator moves the mean
of the sites by -h / alpha, with h = h - alpha / K times the sum of all changes. Sites count alike. The paper assumes
that a round ends near a minimum of the site's loss: with few steps at a high learning rate the method diverges.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyclinic.methods.fedavg import FedAvg
from polyclinic.methods.fedprox import towards
from polyclinic.methods.shared import aggregation, local_training
from polyclinic.methods.shared.method import Federation, Parcel, Reply, Site, State, Traits, Weights, Work, operation
from polyclinic.training.plans import Correction, Fit


class FedDyn(FedAvg):
    name: Literal["feddyn"] = "feddyn"  # type: ignore[assignment]
    weighting: Literal["uniform"] = Field("uniform", description="sites count alike in the mean, as in the paper")
    alpha: float = Field(0.1, ge=0, description="strength of the terms; 0 is FedAvg of equal weights")

    summary: ClassVar[str] = "FedAvg with a dynamic regulariser at each site"
    traits: ClassVar[Traits] = replace(FedAvg.traits, weights_stay=False)

    def combine(self, federation: Federation, state: State, replies: Iterable[Reply]) -> dict[str, Tensor]:
        answers = list(replies)
        mean = super().combine(federation, state, answers)
        if self.alpha == 0:
            return mean
        learned = [name for name, _ in federation.trainer.model.named_parameters() if name in mean]
        before = getattr(state, "h", None) or {name: torch.zeros_like(mean[name]) for name in learned}
        share = aggregation.count_sites(answers) / len(federation.sites)
        state.h = {n: before[n] - self.alpha * share * (mean[n] - state.weights[n]) for n in learned}
        return mean | {name: mean[name] - state.h[name] / self.alpha for name in learned}

    @operation("weights", plan=Fit)
    def train(self, site: Site, weights: Weights) -> Work[Parcel]:
        kept = site.state.group("linear")
        learned = [name for name, _ in site.trainer.model.named_parameters() if name in weights]
        linear = {name: kept.get(name, torch.zeros_like(weights[name])) for name in learned}
        follow = Correction(self._regularise, {"start": weights, "linear": linear})
        spec = replace(self.fit_spec(site, weights), correction=follow)
        parcel = yield from local_training.plan_train(site, weights, spec)
        moved = {name: parcel.tensors[name] - weights[name] for name in learned}
        site.state.put("linear", {name: linear[name] - self.alpha * moved[name] for name in learned})
        return parcel

    def _regularise(
        self, gradients: Weights, weights: Weights, given: Mapping[str, Weights], state: Weights
    ) -> tuple[Weights, Weights]:
        """Adds the gradients of both terms, the quadratic one and the linear one."""
        if self.alpha == 0:
            return gradients, state
        pulled, state = towards(self.alpha)(gradients, weights, given, state)
        linear = given["linear"]
        return {name: one - linear[name] if name in linear else one for name, one in pulled.items()}, state
