"""Fedsamples: every site trains a generator of its own and sends samples once; the coordinator trains on all of them.

What leaves is samples alone, of what the generator learned: images, or features behind a public front (an encoder, or
the layers that `model.freeze` freezes). How they are made and audited at a site is in `shared/site_samples.py`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from polyclinic.errors import BadInput
from polyclinic.federation.federation import State
from polyclinic.generators import Generator
from polyclinic.methods.shared import local_training, replay_space, site_samples
from polyclinic.methods.shared.method import (
    Call,
    Federation,
    Method,
    Parcel,
    Reply,
    Site,
    Traits,
    Weights,
    all_sites,
    operation,
)
from polyclinic.methods.shared.one_round import head_shape, projection
from polyclinic.methods.shared.shared_images import pooled_images
from polyclinic.models import Encoded
from polyclinic.training.optimizer import coordinator_optimizer, keep_coordinator_optimizer

if TYPE_CHECKING:
    from polyclinic.federation.collaborators import Batch

#: where the coordinator's trainer keeps the limits of features, and their shape
LIMITS = "limits of samples"
LEAST_DEVIATION = 1e-3


def _of_samples(method: "FedSamples", site: Site) -> int:
    return site_samples.most_numbers(site, method.samples)


class FedSamples(Method):
    name: Literal["fedsamples"] = "fedsamples"
    fraction: float = all_sites()
    rounds: int = Field(20, ge=1, description="passes of the coordinator over the samples")
    samples: int | None = Field(None, ge=1, description="samples of a site; about its number of images if not given")
    looks: int = Field(
        8,
        ge=0,
        description="times that a site's audit looks at its generator in training, which a run can be resumed from; 0 "
        "for no audit",
    )
    numbers: int | None = Field(None, ge=8, description="project encoder features to so many numbers by random signs")

    summary: ClassVar[str] = "one round: sites send samples of their own generators, audited before they leave"
    traits: ClassVar[Traits] = Traits(
        trains="network in steps", batch_norm="average", private_networks=("generator",), takes_frozen_features=True
    )
    usual_generator: ClassVar[str] = "flow"
    learns_features: ClassVar[bool] = True

    # --- the coordinator --------------------------------------------------------------------------

    def run(self, federation: Federation) -> Weights:
        if self._shape(federation) and not isinstance(federation.trainer.model, Encoded):
            federation.once("front", lambda: replay_space.hand_out_front(federation))
        site_samples.train_at_sites(federation, "train_generator", self.looks)
        samples = site_samples.collect(federation, "give_samples")
        state = federation.state(weights=federation.initial_weights(), head={})
        for _ in federation.rounds(self.rounds, state):
            trained = self._train_head if self._sends_vectors(federation) else self._train_network
            trained(federation, state, samples)
            federation.evaluate(state.weights)
        return state.weights

    def _train_network(self, federation: Federation, state: State, samples: Weights) -> None:
        """One pass over samples that are images, or maps that the frozen layers give."""
        trainer = federation.trainer
        model = trainer.load(state.weights)
        optimizer = coordinator_optimizer(federation, state, model.parameters())
        if self._shape(federation):
            rest, limits = trainer.split(model)[1], self._limits(federation)
            batches = self._batches(federation, limits.to_latents(samples["images"].float() / 255), samples["labels"])
            trainer.train(batches, len(samples["labels"]) // self._size(federation, samples), optimizer, model=rest)
        else:
            part = pooled_images(samples)
            batches = trainer.mixed(trainer.batches(part, federation.rng("batches")), federation.rng("mixup"))
            trainer.train(batches, trainer.steps_in(part), optimizer)
        keep_coordinator_optimizer(federation, state, optimizer)
        state.weights = trainer.weights()

    def _train_head(self, federation: Federation, state: State, samples: Weights) -> None:
        """One pass of a linear head over vectors, which have unit variance for it."""
        trainer, (features, outputs) = federation.trainer, head_shape(federation)
        rows = self._limits(federation).to_latents(samples["images"].float() / 255).flatten(1)
        mean, scale = rows.mean(0), rows.std(0, correction=0).clamp(min=LEAST_DEVIATION)
        head = nn.Linear(rows.shape[1], outputs, device=trainer.device)
        with torch.no_grad():
            for name, weight in head.named_parameters():
                weight.copy_(state.head[name]) if state.head else weight.zero_()
        optimizer = coordinator_optimizer(federation, state, head.parameters())
        batches = self._batches(federation, (rows - mean) / scale, samples["labels"])
        trainer.train(batches, len(rows) // self._size(federation, samples), optimizer, model=head)
        keep_coordinator_optimizer(federation, state, optimizer)
        state.head = {name: weight.detach().cpu().clone() for name, weight in head.named_parameters()}
        slopes = (state.head["weight"] / scale).double()
        offset = state.head["bias"].double() - slopes @ mean.double()
        signs = projection(features, self.numbers)
        whole = slopes if signs is None else slopes @ signs.T
        state.weights = {"fc.weight": whole.float().contiguous(), "fc.bias": offset.float()}

    def _batches(self, federation: Federation, rows: Tensor, labels: Tensor) -> "Iterator[Batch]":
        targets, size = federation.trainer.task.targets(labels), self._size(federation, {"labels": labels})
        return local_training.one_pass(rows, targets, size, federation.rng("batches"), federation.trainer.device)

    def _size(self, federation: Federation, samples: Weights) -> int:
        return min(federation.trainer.optimizer.batch_size, len(samples["labels"]))

    # --- the space of samples ---------------------------------------------------------------------

    def _shape(self, federation: Federation) -> tuple[int, ...] | None:
        """The shape [C, h, w] of features, where sites send these and not images."""
        if getattr(federation.generator, "space", None) != "features":
            return None
        blank = np.zeros((1, *federation.image_shape), np.uint8)
        trainer = federation.trainer
        if trainer.model.frozen_shape is None:
            trainer.load(federation.initial_weights())
        return tuple(replay_space.as_maps(trainer.latents(blank), self.numbers).shape[1:])

    def _sends_vectors(self, federation: Federation) -> bool:
        return isinstance(federation.trainer.model, Encoded) and self._shape(federation) is not None

    def _limits(self, federation: Federation) -> replay_space.Limits:
        """The limits of features, worked out once."""
        trainer = federation.trainer
        if LIMITS not in trainer.kept:
            trainer.load(federation.initial_weights())
            trainer.kept[LIMITS] = replay_space.public_limits(trainer, federation.image_shape, self.numbers)
        return trainer.kept[LIMITS]

    def check_reply(self, federation: Federation, call: Call, reply: Reply) -> None:
        if call.operation == "give_samples":
            most = site_samples.most_samples(federation.trainer.target, self.samples)
            site_samples.check(federation, reply, self._shape(federation) or federation.image_shape, most)

    # --- at a site --------------------------------------------------------------------------------

    @operation(takes={"weights": "front"})
    def take_front(self, site: Site, weights: Weights) -> None:
        """Keep the frozen layers, whose features are learned."""
        site.state.put(replay_space.FRONT, weights)

    @operation()
    def train_generator(self, site: Site, leg: int, legs: int) -> None:
        """A part of the training of the site's generator, and a look of its audit."""
        site_samples.train(site, leg, legs, looks=self.looks > 0)

    @operation("synthetic-images", most={"synthetic-images": _of_samples})
    def give_samples(self, site: Site) -> Parcel:
        return site_samples.give(site, self.samples, looks=self.looks > 0)

    # --- the study's checks -----------------------------------------------------------------------

    def needs_generator(self) -> bool:
        return True

    def check_generator(self, generator: Generator, task: str) -> None:
        features = getattr(generator, "space", None) == "features"
        if features and task == "segmentation":
            raise BadInput("generator.space: features of a public front have no masks; set it to 'pixels'")
        if self.numbers is not None and not features:
            raise BadInput("method.numbers: is for features; set generator.space = 'features', or take it out")
