"""SCAFFOLD (Karimireddy et al. 2020, Algorithm 1): FedAvg whose sites correct their drift with control variates.

A site steps along g - c_k + c, with its own control c_k and the coordinator's c. Option II gives the new c_k as
c_k - c + (x - y) / (K lr); for plain SGD that is the mean of the K mini-batch gradients g, which is what is computed
here, so that the option means the same for any optimiser. A control is a mean gradient: it leaves as such.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from polyclinic.federation.call import Call, Reply
from polyclinic.federation.federation import Federation, Weights
from polyclinic.federation.leaving.parcel import Parcel
from polyclinic.federation.operation import operation
from polyclinic.federation.site import Site
from polyclinic.methods.fedavg import FedAvg
from polyclinic.methods.shared import averaging, local_training, reply_checks
from polyclinic.methods.shared.averaging import WeightedMean
from polyclinic.methods.shared.traits import Traits
from polyclinic.training import private


class Scaffold(FedAvg):
    name: Literal["scaffold"] = "scaffold"  # type: ignore[assignment]
    weighting: Literal["samples", "uniform"] = Field(
        "uniform", description="how sites count in the mean: all alike, as in the paper, or by their number of images"
    )
    option: Literal["I", "II"] = Field(
        "II",
        description="a site's new control: the gradient at the round's weights over all its images (I, one more pass), "
        "or the mean of the round's mini-batch gradients (II)",
    )
    server_lr: float = Field(1.0, gt=0, description="learning rate of the coordinator")

    summary: ClassVar[str] = "FedAvg whose sites correct their drift with control variates"
    traits: ClassVar[Traits] = replace(FedAvg.traits, weights_stay=False)

    def privacy_obstacle(self) -> str | None:
        if self.option == "II":
            return None
        return (
            "method.option: 'I' needs a gradient over all images besides the private steps; "
            "set method.option = 'II' under differential privacy"
        )

    def run(self, federation: Federation) -> Weights:
        weights = federation.initial_weights()
        learned = dict(federation.trainer.model.named_parameters())
        control = {name: torch.zeros_like(weights[name]) for name in learned}
        state = federation.state(weights=weights, control=control)
        for _ in federation.rounds(self.rounds, state):
            replies = federation.ask_all("train", weights=state.weights, gradients=state.control)
            mean = averaging.average(replies, self.weighting)
            changes = WeightedMean()
            for reply in replies:
                changes.add(reply.gradients, 1)
            share = len(replies) / len(federation.sites)
            state.control = {name: state.control[name] + share * c for name, c in changes.tensors().items()}
            state.weights = mean | {name: self._step(state.weights[name], mean[name]) for name in learned}
            federation.evaluate(state.weights)
        return state.weights

    def _step(self, before: Tensor, mean: Tensor) -> Tensor:
        """x + lr (mean - x), written around the mean: with lr = 1 FedAvg's to the last bit."""
        return mean + (self.server_lr - 1) * (mean - before)

    def check_reply(self, federation: Federation, call: Call, reply: Reply) -> None:
        super().check_reply(federation, call, reply)
        if call.operation == "train":
            reply_checks.check_like(reply, "gradients", dict(federation.trainer.model.named_parameters()))

    @operation("weights", "gradients", begins_round=True)
    def train(self, site: Site, weights: Weights, gradients: Weights) -> tuple[Parcel, Parcel]:
        """Trained weights, and how much the site's control variate has changed."""
        own = site.state.group("control") or {name: torch.zeros_like(one) for name, one in gradients.items()}
        drift = {name: (gradients[name] - own[name]).to(site.trainer.device) for name in gradients}
        mean = WeightedMean()

        def correct(model: nn.Module) -> None:
            found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
            mean.add(found, 1)
            for name, gradient in found.items():
                gradient.add_(drift[name])

        fresh = self._full_gradient(site, weights) if self.option == "I" else None
        parcel = local_training.train(
            site, weights, steps=self.steps_at(site), correct=correct, replayed=self.replayed(site)
        )
        new = {**own, **(fresh or {name: gradient.cpu() for name, gradient in mean.tensors().items()})}
        site.state.put("control", new)
        change = {name: new[name] - own[name] for name in own}
        return parcel, Parcel("gradients", change, parcel.metadata, private.record_of(site, "classifier"))

    @staticmethod
    def _full_gradient(site: Site, weights: Weights) -> dict[str, Tensor]:
        trainer = site.trainer
        trainer.load(local_training.assemble(site, weights))
        return local_training.mean_gradient(trainer, trainer.one_pass(site.data.train, site.rng("control")))
