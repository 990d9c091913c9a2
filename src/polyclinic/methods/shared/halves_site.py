"""A site's GAN in training (`AdversarialModel`), whose images others judge between two halves of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from polyclinic.generators.base import RandomSource, as_tensor
from polyclinic.generators.gan.adversarial import AdversarialModel
from polyclinic.methods.shared.training_gans import (
    DISCRIMINATOR_ADAM,
    GENERATOR_ADAM,
    NETWORKS,
    STEPS,
    ImageGradient,
    SyntheticBatch,
    batch_rows,
    steps_taken,
)
from polyclinic.randomness import torch_rng
from polyclinic.training.optimizer import optimizer_tensors, restore_optimizer

if TYPE_CHECKING:
    from polyclinic.federation.site import Site

COUNTERS = "gan-"  # begins the names of `AdversarialSteps.counters` in a site's state


class SiteGANInHalves:
    """`TrainingGANs` of one site; lives for one round, and `keep` puts what was learnt into the site's state."""

    def __init__(self, site: Site, model: AdversarialModel, *, shared_noise: bool, purpose: str) -> None:
        self.site, self.model = site, model
        part = site.data.train
        images = model.accept_images(np.asarray(part.images))
        labels = as_tensor(np.asarray(part.labels))
        self.steps = model.begin_halves(images, labels, site.rng(purpose))
        self.noise = self.steps.random
        if shared_noise:  # PrivGAN's code: in every step all generators get the same noise
            self.noise = RandomSource(torch_rng(site.seed, "noise", purpose, site.round), model.device)
        restore_optimizer(self.steps.of_generator, site.state.group(GENERATOR_ADAM))
        restore_optimizer(self.steps.of_discriminator, site.state.group(DISCRIMINATOR_ADAM))
        self.steps.taken = steps_taken(site)
        kept = {name: COUNTERS + name for name in self.steps.counters()}
        self.steps.restore_counters({name: site.state[key] for name, key in kept.items() if key in site.state})
        self.labels = self.fake = torch.empty(0)  # of the images that were made last

    @property
    def names(self) -> list[str]:
        return [self.site.name]

    @property
    def rows(self) -> int:
        return batch_rows(self.site)

    def start(self) -> list[SyntheticBatch]:
        self._discriminate_and_make()
        return [SyntheticBatch(self._cropped(self.fake).detach(), self.labels)]

    def advance(self, gradients: Mapping[str, Tensor]) -> list[SyntheticBatch]:
        self._generator_step(gradients.get(self.site.name))
        return self.start()

    def finish(self, gradients: Mapping[str, Tensor]) -> None:
        self._generator_step(gradients.get(self.site.name))
        self.keep()

    def local_step(self, image_gradient: ImageGradient | None = None, draws: Tensor | None = None) -> None:
        self._discriminate_and_make()
        images = self._cropped(self.fake)
        gradient = None if image_gradient is None else image_gradient(images, self.labels, draws)  # type: ignore[arg-type]
        self._generator_step(gradient)

    @torch.no_grad()
    def sample(self, count: int) -> list[SyntheticBatch]:
        images: list[Tensor] = []
        labels: list[Tensor] = []
        while sum(len(some) for some in labels) < count:
            labels.append(next(self.steps.batches)[1])
            images.append(self._cropped(self.steps.make(labels[-1], self.noise)))
        return [SyntheticBatch(torch.cat(images)[:count], torch.cat(labels)[:count])]

    def keep(self) -> None:
        state = self.site.state
        state.put(NETWORKS, self.model.state())
        state.put(GENERATOR_ADAM, optimizer_tensors(self.steps.of_generator))
        state.put(DISCRIMINATOR_ADAM, optimizer_tensors(self.steps.of_discriminator))
        state[STEPS] = torch.tensor(self.steps.taken)
        for name, value in self.steps.counters().items():
            state[COUNTERS + name] = value

    # --- inside -------------------------------------------------------------------------------------

    def _discriminate_and_make(self) -> None:
        self.labels = self.steps.discriminator_half()
        self.fake = self.steps.make(self.labels, self.noise)

    def _generator_step(self, gradient: Tensor | None) -> None:
        """`gradient` is of the images as they left: at the border that was cut off, it is zero."""
        missing = self.fake.shape[-1] - self.model.size
        if gradient is not None:
            gradient = F.pad(gradient.to(self.model.device).float(), (0, missing, 0, missing))
        self.steps.generator_half(self.fake, self.labels, gradient)
        self.fake = torch.empty(0)

    def _cropped(self, images: Tensor) -> Tensor:
        return images[..., : self.model.size, : self.model.size]
