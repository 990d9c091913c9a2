"""CWT+Replay (Qu et al. 2022, Algorithm 1): cyclical weight transfer whose sites replay what the others know.

In the paper's first round a generator (VQ-VAE-2) goes from site to site. In all later rounds the classifier does, and
each site trains it on its own images and on replayed ones. Both halves of the algorithm are here; what single steps
do with a generator is in `shared/generative_replay.py`, whose operations this method has: `train_generator` (lines 8
to 21), `encode_images` and `take_replay`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar, Literal

from torch import Tensor

from polyclinic.methods.cwt import CyclicWeightTransfer
from polyclinic.methods.shared import generative_replay, local_training
from polyclinic.methods.shared.generative_replay import GenerativeReplay, replay_settings
from polyclinic.methods.shared.method import Federation, Parcel, Site, Weights, operation
from polyclinic.training.plans import FitSpec


class CwtReplay(GenerativeReplay, CyclicWeightTransfer):
    name: Literal["cwt-replay"] = "cwt-replay"  # type: ignore[assignment]

    summary: ClassVar[str] = "CWT whose sites also train on replayed images of all"

    def run(self, federation: Federation) -> Weights:
        """Lines 22 to 30: the server."""
        if replay_settings(federation).ratio > 0:
            generative_replay.hand_out_front(federation)  # where latents are replayed, and not images
            # round t = 1: each site trains the generator, and hands it on with the codes of all images so far
            carried: Mapping[str, Tensor] = {}
            for site in federation.sites:
                carried = generative_replay.train_generator_at(federation, site, carried)
            # each site encodes its images with the finished generator; decoder, codes and labels of all go to all
            generative_replay.distribute(federation, carried)
        # rounds t > 1: each site trains the classifier, and hands it on
        state = federation.state(weights=federation.initial_weights())
        for _ in federation.rounds(self.rounds, state):
            for site in federation.chosen:
                reply = federation.ask(site, "train", weights=state.weights)
                if reply:
                    state.weights = reply.weights
                    federation.handed_over(site, state.weights)
            federation.evaluate(state.weights)
        return state.weights

    @operation("weights")
    def train(self, site: Site, weights: Weights) -> Parcel:
        """Lines 1 to 7: train the classifier on mini-batches of real images, each joined by a replayed one."""
        replayed = partial(generative_replay.replayed, site)
        spec = FitSpec(self.steps_at(site), class_weights=self.class_weights(site), replayed=replayed)
        return local_training.train(site, weights, spec)
