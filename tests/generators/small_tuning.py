"""Small studies of private tuning."""

from __future__ import annotations

import torch

from polyclinic.generators.gan.settings import DCGAN
from polyclinic.generators.private_tuning import (
    PrivateTuning,
)
from polyclinic.metrics.distribution import Extractor
from polyclinic.tasks import Target

TWO = Target(("a", "b"))


TINY = DCGAN(width=2, latent=4, batch_size=8, steps=5)


#: cheap features: means over a grid of 4x4
COARSE = Extractor(lambda images: torch.nn.functional.adaptive_avg_pool2d(images[:, :1], 4).flatten(1), "coarse")


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def data(count=24):
    images = torch.randint(0, 256, (count, 1, 28, 28), dtype=torch.uint8, generator=rng(9))
    return images, torch.arange(count) % 2


def build(settings=TINY):
    return settings.build(channels=1, size=28, target=TWO, seed=0)


TUNING = PrivateTuning(check_every=10, patience=30, most_steps=1000, most_tuning_steps=1000)
