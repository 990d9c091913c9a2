"""Mini-batches for a GAN: real images in [-1, 1] in shuffled passes or balanced by class, and labels for fake ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from polyclinic.federation.collaborators import Batch
from polyclinic.generators.base import as_tensor
from polyclinic.generators.labels import check_labels
from polyclinic.generators.random_source import RandomSource
from polyclinic.tasks import Target

if TYPE_CHECKING:
    from polyclinic.generators.gan.model import GANModel
    from polyclinic.generators.gan.settings import GAN


def random_labels(count: int, target: Target, random: RandomSource) -> Tensor:
    """Labels drawn alike from the classes, or from the public range of values: they tell nothing about any image."""
    if target.classes:
        return random.integers(len(target.classes), count)
    low, high = target.label_range or (0.0, 0.0)
    return low + (high - low) * random.uniform(count)


class RealBatches:
    """Shuffled mini-batches of real images in [-1, 1] on the device, joined by replayed ones where there are any."""

    def __init__(
        self,
        model: GANModel,
        images: Tensor | np.ndarray,
        labels: Tensor | np.ndarray,
        rng: torch.Generator,
        replayed: Iterator[Batch] | None = None,
    ) -> None:
        self.model, self.replayed = model, replayed
        self.images = model.on_device(model.accept_images(images))
        self.labels = model.on_device(check_labels(as_tensor(labels), len(images), model.target))
        self._order = index_batches(self.labels.cpu(), model.settings, rng)
        self.joined = model.settings.batch_size

    def next(self) -> tuple[Tensor, Tensor]:
        return self.at(next(self._order))

    def at(self, index: Tensor) -> tuple[Tensor, Tensor]:
        index = self.model.on_device(index)
        real, labels = centred(self.images[index]), self.labels[index]
        if self.replayed is None:
            return real, labels
        more, known = next(self.replayed)
        joined = self.model.on_device(more) * 2 - 1
        return torch.cat([real, joined]), torch.cat([labels, self.model.on_device(known).to(labels.dtype)])


def centred(images: Tensor) -> Tensor:
    """uint8 images as float32 in [-1, 1]."""
    return images.float().div_(127.5).sub_(1)


def index_batches(labels: Tensor, settings: GAN, rng: torch.Generator) -> Iterator[Tensor]:
    """Indices of real images, batch after batch, as the settings want them drawn."""
    if settings.balance and not labels.is_floating_point():
        return balanced_batches(labels, settings.batch_size, rng)
    return endless_batches(len(labels), settings.batch_size, rng)


def balanced_batches(labels: Tensor, size: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Indices drawn with replacement: the classes that are there take turns, so each comes as often in a batch."""
    groups = [torch.nonzero(labels == one)[:, 0] for one in labels.unique()]
    turns = [groups[row % len(groups)] for row in range(size)]
    while True:
        draws = torch.rand(size, generator=rng)
        yield torch.stack([group[int(at * len(group))] for group, at in zip(turns, draws.tolist(), strict=True)])


def endless_batches(images: int, size: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Indices of one shuffled pass after another, in batches of exactly `size`, or of all images if those are fewer."""
    size = min(size, images)
    while True:
        order = torch.randperm(images, generator=rng, device=rng.device)
        yield from order[: images // size * size].split(size)
