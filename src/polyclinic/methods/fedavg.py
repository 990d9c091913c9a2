"""FedAvg (McMahan et al. 2017): all sites train from the same weights; their mean is the next round's."""

from collections.abc import Iterable
from functools import partial
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from polyclinic.federation.call import Call, Reply
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods.shared import local_training
from polyclinic.methods.shared.aggregation import Aggregation, average, check_samples, check_shared_weights, robust_mean
from polyclinic.methods.shared.local_training import LocalWork
from polyclinic.methods.shared.method import Federation, ReplayMethod, Site, State, Traits, Weights, Work, operation
from polyclinic.training.plans import Fit, FitSpec


class FedAvg(LocalWork, ReplayMethod):
    name: Literal["fedavg"] = "fedavg"
    weighting: Literal["samples", "uniform"] = Field("samples", description="count sites by their images, or all alike")
    aggregation: Aggregation = Field(
        "mean",
        description="how the sites' weights become one: their mean, or a robust rule, which a few poisoned updates "
        "cannot move far",
    )
    liars: float = Field(
        0.25, ge=0, lt=0.5, description="largest share of sites that may poison updates (trimmed-mean, multi-krum)"
    )
    apart: float = Field(
        0.0, ge=-1, le=1, description="clusters: the smaller of two groups whose cosines stay below this is left out"
    )

    summary: ClassVar[str] = "all sites train at once, the mean of their weights is the next round's"
    traits: ClassVar[Traits] = Traits(takes_frozen_features=True, weights_stay=True, label_sets=True)
    SUMMED: ClassVar[dict[str, str]] = {"train": "mean"}

    def run(self, federation: Federation) -> Weights:
        state = federation.state(weights=federation.initial_weights())
        for _ in federation.rounds(self.rounds, state):
            replies = federation.ask_each("train", weights=state.weights)
            state.weights = self.combine(federation, state, replies)
            federation.evaluate(state.weights)
        return state.weights

    def sum_obstacle(self) -> str | None:
        if self.aggregation != "mean":
            return (
                f"method.aggregation: '{self.aggregation}' compares the sites' weights, and a sum shows none of them; "
                "set method.aggregation = 'mean', or federation.sum = 'float'"
            )
        return super().sum_obstacle()

    def combine(self, federation: Federation, state: State, replies: Iterable[Reply]) -> dict[str, Tensor]:
        """The next round's weights: the mean of the sites', or what `aggregation` puts in its place."""
        if self.aggregation == "mean":
            return average(replies, self.weighting)
        return robust_mean(self.aggregation, state.weights, list(replies), self.weighting, self.liars, self.apart)

    def check_reply(self, federation: Federation, call: Call, reply: Reply) -> None:
        if call.operation == "train":
            check_shared_weights(federation, reply)
            if self.weighting == "samples":
                check_samples(reply)

    @operation("weights", plan=Fit)
    def train(self, site: Site, weights: Weights) -> Work[Parcel]:
        return local_training.plan_train(site, weights, self.fit_spec(site, weights))

    def fit_spec(self, site: Site, weights: Weights) -> FitSpec:
        """A site's training from the round's weights: for how long, with what it replays."""
        return FitSpec(self.steps_at(site), replayed=partial(self.replayed, site))
