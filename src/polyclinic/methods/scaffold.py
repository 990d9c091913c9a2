"""SCAFFOLD (Karimireddy et al. 2020, Algorithm 1): FedAvg whose sites correct their drift with control variates.

A site steps along g - c_k + c, with its own control c_k and the coordinator's c. Option II gives the new c_k as
c_k - c + (x - y) / (K lr); for plain SGD that is the mean of the K mini-batch gradients g, which is what is computed
here, so that the option means the same for any optimiser. A control is a mean gradient: it leaves as such.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field

from polyclinic.methods.fedavg import FedAvg
from polyclinic.methods.shared import local_training, reply_checks
from polyclinic.methods.shared.aggregation import average, count_sites
from polyclinic.methods.shared.method import Call, Federation, Parcel, Reply, Site, Traits, Weights, Work, operation
from polyclinic.training import private
from polyclinic.training.plans import Correction, Fit


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
    traits: ClassVar[Traits] = replace(FedAvg.traits, weights_stay=False, label_sets=False)

    def privacy_obstacle(self) -> str | None:
        if self.option == "II":
            return None
        return "method.option: 'I' needs a gradient over all images besides the private steps; set method.option = 'II'"

    def sum_obstacle(self) -> str | None:
        if self.weighting == "uniform":
            return super().sum_obstacle()
        return (
            "method.weighting: scaffold counts sites alike in its control variates, and a sum has one weight for all; "
            "set method.weighting = 'uniform', or federation.sum = 'float'"
        )

    def run(self, federation: Federation) -> Weights:
        weights = federation.initial_weights()
        learned = dict(federation.trainer.model.named_parameters())
        state = federation.state(weights=weights, control={name: torch.zeros_like(weights[name]) for name in learned})
        for _ in federation.rounds(self.rounds, state):
            replies = federation.ask_all("train", weights=state.weights, gradients=state.control)
            mean, changes = self.combine(federation, state, replies), average(replies, "uniform", "gradients")
            share = count_sites(replies) / len(federation.sites)
            state.control = {name: state.control[name] + share * change for name, change in changes.items()}
            # x + lr (mean - x), written around the mean: with lr = 1 FedAvg's to the last bit
            beyond, before = self.server_lr - 1, state.weights
            state.weights = mean | {name: mean[name] + beyond * (mean[name] - before[name]) for name in learned}
            federation.evaluate(state.weights)
        return state.weights

    def check_reply(self, federation: Federation, call: Call, reply: Reply) -> None:
        super().check_reply(federation, call, reply)
        if call.operation == "train":
            reply_checks.check_like(reply, "gradients", dict(federation.trainer.model.named_parameters()))
            # the control is added to the gradients of all steps; after several of them, others have turned back
            reply_checks.check_step(call, reply, federation.trainer.optimizer.lr * min(self.local_steps or 10, 10))

    @operation("weights", "gradients", plan=Fit)
    def train(self, site: Site, weights: Weights, gradients: Weights) -> Work[tuple[Parcel, Parcel]]:
        """Trained weights, and how much the site's control variate has changed."""
        start, trainer = local_training.assemble(site, weights), site.trainer
        own = site.state.group("control") or {name: torch.zeros_like(one) for name, one in gradients.items()}
        new = dict(own)
        if self.option == "I":
            trainer.load(start)
            new |= local_training.mean_gradient(trainer, trainer.one_pass(site.data.train, site.rng("control")))
        drift = {name: gradients[name] - own[name] for name in gradients}
        nothing = {name: torch.zeros_like(one, dtype=torch.float64) for name, one in gradients.items()}
        correction = Correction(_add_drift, {"drift": drift}, nothing)
        fitted = yield Fit(site, start, replace(self.fit_spec(site, weights), correction=correction))
        parcel, steps = local_training.release(site, fitted), fitted.metadata["steps"]
        if self.option == "II" and steps:  # none is left where differential privacy has spent its epsilon
            new |= {name: (total / steps).to(own[name].dtype).cpu() for name, total in fitted.state.items()}
        site.state.put("control", new)
        change = {name: new[name] - own[name] for name in own}
        return parcel, Parcel("gradients", change, parcel.metadata, private.record_of(site, "classifier"))


def _add_drift(
    gradients: Weights, weights: Weights, given: Mapping[str, Weights], state: Weights
) -> tuple[Weights, Weights]:
    """Adds c - c_k to the gradients; the state is their sum before that."""
    sums = {**state, **{name: state[name] + gradient for name, gradient in gradients.items()}}
    return {name: gradient + given["drift"][name] for name, gradient in gradients.items()}, sums
