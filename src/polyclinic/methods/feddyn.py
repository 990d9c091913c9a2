"""FedDyn (Acar et al. 2021, Algorithm 1): each site's loss gets a linear and a quadratic term that follow the rounds.

A site steps along g - h_k + alpha (w - w_round), then h_k = h_k - alpha (w_k - w_round). The coordinator moves the mean
of the sites by -h / alpha, with h = h - alpha / K times the sum of all changes. Sites count alike. The paper assumes
that a round ends near a minimum of the site's loss: with few steps at a high learning rate the method diverges.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from polyclinic.federation.call import Reply
from polyclinic.federation.federation import Federation, State, Weights
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import operation
from polyclinic.federation.site import Site
from polyclinic.methods.fedavg import FedAvg
from polyclinic.methods.shared import averaging, local_training
from polyclinic.methods.shared.local_training import Correct
from polyclinic.methods.shared.traits import Traits


class FedDyn(FedAvg):
    name: Literal["feddyn"] = "feddyn"  # type: ignore[assignment]
    weighting: Literal["uniform"] = Field("uniform", description="sites count alike in the mean, as in the paper")
    alpha: float = Field(0.1, ge=0, description="strength of the terms; 0 is FedAvg of equal weights")

    summary: ClassVar[str] = "FedAvg with a dynamic regulariser at each site"
    traits: ClassVar[Traits] = replace(FedAvg.traits, weights_stay=False)

    def combine(self, federation: Federation, state: State, replies: Iterable[Reply]) -> Weights:
        answers = list(replies)
        mean = self.mean_weights(state, answers)
        if self.alpha == 0:
            return mean
        learned = [name for name, _ in federation.trainer.model.named_parameters() if name in mean]
        before = getattr(state, "h", None) or {name: torch.zeros_like(mean[name]) for name in learned}
        share = averaging.count_sites(answers) / len(federation.sites)
        state.h = {n: before[n] - self.alpha * share * (mean[n] - state.weights[n]) for n in learned}
        return mean | {name: mean[name] - state.h[name] / self.alpha for name in learned}

    @operation("weights", begins_round=True, together="train_together", summed="mean")
    def train(self, site: Site, weights: Weights) -> Parcel:
        regularise = self._regularise(site, weights, site.state.group("linear"))
        parcel = local_training.train(site, weights, replace(self.fit_spec(site), correct=regularise))
        return self._follow(site, weights, parcel)

    def train_together(self, sites: list[Site], weights: list[Weights]) -> list[Parcel]:
        terms = [site.state.group("linear") for site in sites]

        def correct_for(places: Sequence[int], stacked: bool) -> Correct:
            if not stacked:
                return self._regularise(sites[places[0]], weights[0], terms[places[0]])
            names = {name for place in places for name in terms[place]}
            linear = {n: torch.stack([terms[p].get(n, torch.zeros_like(weights[0][n])) for p in places]) for n in names}
            return self._regularise(sites[places[0]], weights[0], linear)

        parcels = local_training.train_together(sites, weights, self.fit_spec, correct_for=correct_for)
        return [self._follow(*one) for one in zip(sites, weights, parcels, strict=True)]

    def _regularise(self, site: Site, weights: Weights, terms: Weights) -> Correct:
        """Adds the gradients of both terms: the quadratic one, and the linear one with these factors."""
        start = {name: tensor.to(site.trainer.device) for name, tensor in weights.items()}
        linear = {name: tensor.to(site.trainer.device) for name, tensor in terms.items()}

        def regularise(model: nn.Module) -> None:
            for name, parameter in model.named_parameters():
                if self.alpha > 0 and parameter.grad is not None and name in start:
                    parameter.grad.add_(parameter.detach() - start[name], alpha=self.alpha)
                    if name in linear:
                        parameter.grad.sub_(linear[name])

        return regularise

    def _follow(self, site: Site, weights: Weights, parcel: Parcel) -> Parcel:
        """The same parcel; the site's linear term has followed what was trained."""
        learned = [name for name, _ in site.trainer.model.named_parameters() if name in parcel.tensors]
        zero = torch.zeros(())
        kept = site.state.group("linear")
        moved = {name: parcel.tensors[name] - weights[name] for name in learned}
        site.state.put("linear", {name: kept.get(name, zero) - self.alpha * moved[name] for name in learned})
        return parcel
