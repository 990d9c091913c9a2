"""SCAFFOLD (Karimireddy et al. 2020, Algorithm 1): FedAvg whose sites correct their drift with control variates.

A site steps along g - c_k + c, with its own control c_k and the coordinator's c. Option II gives the new c_k as
c_k - c + (x - y) / (K lr); for plain SGD that is the mean of the K mini-batch gradients g, which is what is computed
here, so that the option means the same for any optimiser. A control is a mean gradient: it leaves as such.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from polyclinic.federation.call import Call, Reply
from polyclinic.federation.federation import Federation, Weights
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import operation
from polyclinic.federation.site import Site
from polyclinic.methods.fedavg import FedAvg
from polyclinic.methods.shared import local_training, reply_checks
from polyclinic.methods.shared.averaging import WeightedMean, count_sites
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
    traits: ClassVar[Traits] = replace(FedAvg.traits, weights_stay=False, label_sets=False)

    def privacy_obstacle(self) -> str | None:
        if self.option == "II":
            return None
        return (
            "method.option: 'I' needs a gradient over all images besides the private steps; "
            "set method.option = 'II' under differential privacy"
        )

    def sum_obstacle(self) -> str | None:
        if self.weighting == "samples":
            return (
                "method.weighting: scaffold counts sites alike in its control variates, and a sum of whole numbers has "
                "one weight for all; set method.weighting = 'uniform', or federation.sum = 'float'"
            )
        return super().sum_obstacle()

    def run(self, federation: Federation) -> Weights:
        weights = federation.initial_weights()
        learned = dict(federation.trainer.model.named_parameters())
        control = {name: torch.zeros_like(weights[name]) for name in learned}
        state = federation.state(weights=weights, control=control)
        for _ in federation.rounds(self.rounds, state):
            replies = federation.ask_all("train", weights=state.weights, gradients=state.control)
            mean = self.mean_weights(state, replies)
            changes = WeightedMean()
            for reply in replies:
                changes.add(reply.gradients, 1)
            share = count_sites(replies) / len(federation.sites)
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
            # the control is added to the gradients of all steps; after several of them, others have turned back
            reply_checks.check_step(call, reply, federation.trainer.optimizer.lr * min(self.local_steps or 10, 10))

    @operation("weights", "gradients", begins_round=True, together="train_together", summed="mean")
    def train(self, site: Site, weights: Weights, gradients: Weights) -> tuple[Parcel, Parcel]:
        """Trained weights, and how much the site's control variate has changed."""
        own = _control(site, gradients)
        correct = Drift(_drift(site, own, gradients))
        fresh = self._full_gradient(site, weights) if self.option == "I" else None
        parcel = local_training.train(site, weights, replace(self.fit_spec(site), correct=correct))
        return self._release(site, parcel, own, fresh or correct.mean())

    def train_together(  # type: ignore[override]
        self, sites: list[Site], weights: list[Weights], gradients: list[Weights]
    ) -> list[tuple[Parcel, Parcel]]:
        steps, own = (
            [self.steps_at(site) for site in sites],
            [_control(*one) for one in zip(sites, gradients, strict=True)],
        )
        drifts = [_drift(*one) for one in zip(sites, own, gradients, strict=True)]
        fresh = [self._full_gradient(*one) if self.option == "I" else {} for one in zip(sites, weights, strict=True)]
        means: dict[int, Callable[[], dict[str, Tensor]]] = {}

        def correct_for(places: Sequence[int], stacked: bool) -> Drift | StackedDrift:
            if not stacked:
                alone = Drift(drifts[places[0]])
                means[places[0]] = alone.mean
                return alone
            together = StackedDrift([drifts[place] for place in places], [steps[place] for place in places])
            means.update({place: partial(together.mean, member) for member, place in enumerate(places)})
            return together

        parcels = local_training.train_together(sites, weights, self.fit_spec, correct_for=correct_for)
        every = enumerate(zip(sites, parcels, own, fresh, strict=True))
        return [self._release(site, parcel, mine, new or means[place]()) for place, (site, parcel, mine, new) in every]

    @staticmethod
    def _release(site: Site, parcel: Parcel, own: Weights, control: Weights) -> tuple[Parcel, Parcel]:
        new = {**own, **control}
        site.state.put("control", new)
        change = {name: new[name] - own[name] for name in own}
        return parcel, Parcel("gradients", change, parcel.metadata, private.record_of(site, "classifier"))

    @staticmethod
    def _full_gradient(site: Site, weights: Weights) -> dict[str, Tensor]:
        trainer = site.trainer
        trainer.load(local_training.assemble(site, weights))
        return local_training.mean_gradient(trainer, trainer.one_pass(site.data.train, site.rng("control")))


class Drift:
    """Takes the mean of a network's gradients as they come, and adds c - c_k to them."""

    def __init__(self, drift: Weights) -> None:
        self.drift, self._mean = drift, WeightedMean()

    def __call__(self, model: nn.Module) -> None:
        found = _gradients(model)
        self._mean.add(found, 1)
        for name, gradient in found.items():
            gradient.add_(self.drift[name])

    def mean(self) -> dict[str, Tensor]:
        return {name: gradient.cpu() for name, gradient in self._mean.tensors().items()}


class StackedDrift:
    """The same for several sites' stacked networks, each of which takes its own number of steps."""

    def __init__(self, drifts: Sequence[Weights], steps: Sequence[int]) -> None:
        self.drift = {name: torch.stack([one[name] for one in drifts]) for name in drifts[0]}
        self.steps, self.taken = steps, 0
        self.sums: dict[str, Tensor] = {}

    def __call__(self, model: nn.Module) -> None:
        for name, gradient in _gradients(model).items():
            counts = torch.tensor([float(self.taken < own) for own in self.steps], device=gradient.device)
            counted = gradient * counts.reshape(-1, *(1 for _ in gradient.shape[1:]))
            self.sums[name] = self.sums[name] + counted if name in self.sums else counted
            gradient.add_(self.drift[name])
        self.taken += 1

    def mean(self, member: int) -> dict[str, Tensor]:
        return {name: (total[member] / self.steps[member]).cpu() for name, total in self.sums.items()}


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def _control(site: Site, gradients: Weights) -> dict[str, Tensor]:
    """The site's control variate; zero in the beginning."""
    return site.state.group("control") or {name: torch.zeros_like(one) for name, one in gradients.items()}


def _drift(site: Site, own: Weights, gradients: Weights) -> dict[str, Tensor]:
    """c - c_k, on the site's device."""
    return {name: (gradients[name] - own[name]).to(site.trainer.device) for name in gradients}
