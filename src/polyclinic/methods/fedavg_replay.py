"""FedAvg+Replay (Qu et al. 2022, section 3.1): FedAvg whose sites replay what the others know.

Before the first round the generator goes from site to site, as in CWT+Replay (`cwt_replay.py`); then all sites train
the classifier at once, each on its own images and on replayed ones, and their mean is the next round's.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal

from polyclinic.federation.federation import Federation, Weights
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import Work, operation
from polyclinic.federation.site import Site
from polyclinic.methods.fedavg import FedAvg
from polyclinic.methods.shared import generative_replay, local_training
from polyclinic.methods.shared.generative_replay import GenerativeReplay
from polyclinic.training.plans import Fit, FitSpec


class FedAvgReplay(GenerativeReplay, FedAvg):
    name: Literal["fedavg-replay"] = "fedavg-replay"  # type: ignore[assignment]

    summary: ClassVar[str] = "FedAvg whose sites also train on replayed images of all"

    def run(self, federation: Federation) -> Weights:
        # site by site train the generator; all encode their images with it; codes and labels of all go to all
        generative_replay.prepare(federation)
        state = federation.state(weights=federation.initial_weights())
        for _ in federation.rounds(self.rounds, state):
            replies = federation.ask_each("train", weights=state.weights)
            state.weights = self.combine(federation, state, replies)
            federation.evaluate(state.weights)
        return state.weights

    @operation("weights", plan=Fit)
    def train(self, site: Site, weights: Weights) -> Work[Parcel]:
        """Train on mini-batches of real images, each joined by a replayed one."""
        replayed = partial(generative_replay.replayed, site)
        return local_training.plan_train(site, weights, FitSpec(self.steps_at(site), replayed=replayed))
