"""One site's GAN in training: its model, its real batches and its random numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from polyclinic.generators.base import RandomSource
from polyclinic.generators.gan.model import GANModel
from polyclinic.generators.gan.trainer import GANTrainer, RealBatches
from polyclinic.randomness import torch_rng

if TYPE_CHECKING:
    from polyclinic.federation.site import Site

#: real images, their labels, labels of fake ones, and random numbers of a discriminator's step
DiscriminatorInputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


class SiteGAN:
    """One site's model, real batches and random numbers."""

    def __init__(self, site: Site, model: GANModel, shared_noise: bool, purpose: str) -> None:
        self.site, self.model = site, model
        part, rng = site.data.train, site.rng(purpose)
        self.batches = RealBatches(self.model, np.asarray(part.images), np.asarray(part.labels), rng)
        self.random = self.noise = RandomSource(rng, site.trainer.device)
        if shared_noise:  # PrivGAN's code: in every step all generators get the same noise
            self.noise = RandomSource(torch_rng(site.seed, "noise", purpose, site.round), site.trainer.device)
        self.wanted = torch.empty(0)  # labels of the fake images to make next

    def discriminator_inputs(self, trainer: GANTrainer) -> DiscriminatorInputs:
        real, labels = self.batches.next()
        self.wanted = self.labels_to_make(labels)
        draws = trainer.draw_for_discriminator(self.random, len(labels), len(self.wanted))
        return real, labels, self.wanted, *draws

    def draw_noise(self) -> Tensor:
        return self.noise.normal(len(self.wanted), self.model.settings.latent)

    def labels_to_make(self, labels: Tensor) -> Tensor:
        return self.model.settings.labels_to_make(labels, self.model.target, self.random)

    def drawn_labels(self) -> Tensor:
        """Labels in which no real image has a part."""
        return self.labels_to_make(torch.zeros(self.model.settings.batch_size, device=self.random.device))
