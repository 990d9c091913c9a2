"""CWT, cyclical weight transfer (Chang et al. 2018): one model goes round, each site trains it and hands it on.

With `weighted_loss` a site weighs its classes inversely to their frequency there, so that the weights of the loss
change cyclically with the site (Balachandar et al. 2020).
"""

from functools import partial
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyclinic.errors import BadInput
from polyclinic.federation.call import Call, Reply
from polyclinic.methods.shared import aggregation, local_training
from polyclinic.methods.shared.local_training import LocalWork
from polyclinic.methods.shared.method import Federation, Parcel, ReplayMethod, Site, Traits, Weights, operation
from polyclinic.training.plans import FitSpec


class CyclicWeightTransfer(LocalWork, ReplayMethod):
    name: Literal["cwt"] = "cwt"
    weighted_loss: bool = Field(False, description="weigh a site's classes inversely to frequency (classification)")

    summary: ClassVar[str] = "one model goes from site to site, each trains it and hands it on"
    traits: ClassVar[Traits] = Traits(weights_stay=True, takes_frozen_features=True)

    def run(self, federation: Federation) -> Weights:
        state = federation.state(weights=federation.initial_weights())
        for _ in federation.rounds(self.rounds, state):
            for site in federation.chosen:
                reply = federation.ask(site, "train", weights=state.weights)
                if reply:
                    state.weights = reply.weights
                    federation.handed_over(site, state.weights)
            federation.evaluate(state.weights)
        return state.weights

    def check_reply(self, federation: Federation, call: Call, reply: Reply) -> None:
        if call.operation == "train":
            aggregation.check_shared_weights(federation, reply)

    @operation("weights")
    def train(self, site: Site, weights: Weights) -> Parcel:
        replayed = partial(self.replayed, site)
        spec = FitSpec(self.steps_at(site), class_weights=self.class_weights(site), replayed=replayed)
        return local_training.train(site, weights, spec)

    def class_weights(self, site: Site) -> Tensor | None:
        if not self.weighted_loss:
            return None
        classes = len(site.trainer.target.classes)
        labels = torch.from_numpy(site.data.train.labels.copy())
        return local_training.class_weights(labels, classes).to(site.trainer.device)

    def privacy_obstacle(self) -> str | None:
        if self.weighted_loss:
            return (
                "method.weighted_loss: the weights come from a site's labels without noise, and one image changes "
                "those of all; set it to false under differential privacy"
            )
        return None

    def check_task(self, task: str) -> None:
        if self.weighted_loss and task != "classification":
            raise BadInput(f"method.weighted_loss: weighs classes, which {task} does not have; set it to false")
