"""What a generator must have for FELICIA to join sites' generators: a discriminator that can also identify sites."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

import torch
from torch import nn

from polyclinic.generators.base import Generator
from polyclinic.generators.gan.losses import GANLoss
from polyclinic.tasks import Target


class AdversarialGenerator(Generator):
    """Settings of a generator that is trained against a discriminator: a GAN, or StyleGAN2."""

    @property
    @abstractmethod
    def gan_loss(self) -> GANLoss:
        """The measure phi."""

    @property
    @abstractmethod
    def separates_classes(self) -> bool:
        """Whether each class has networks of its own."""

    @property
    @abstractmethod
    def ignores_labels(self) -> bool:
        """Whether images are made without regard to labels."""

    @abstractmethod
    def central_discriminator(
        self, *, channels: int, size: int, target: Target, sites: int, per_class: bool = False
    ) -> nn.Module:
        """The discriminator with an output for each site instead of one, and without labels as an input.

        It takes images [B, C, H, W] in [-1, 1] and labels [B], and gives logits [B, sites]. `per_class`: there is a
        network for each class, and labels choose it; otherwise labels change nothing. Its weights are drawn from
        torch's global state.
        """

    @abstractmethod
    def central_optimizer(
        self, parameters: Iterable[nn.Parameter], lr: float | None, *, capturable: bool
    ) -> torch.optim.Optimizer:
        """The optimiser that this generator's discriminator has, with another learning rate where one is given."""
