"""Mini-batches of a site's images: endless, shuffled, one at a time or those of several steps at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from polyclinic.federation.collaborators import Batch
from polyclinic.training.augmentation import Changes, draw_changes

if TYPE_CHECKING:
    from polyclinic.data.parts import ImageSet
    from polyclinic.training.loop import Trainer
    from polyclinic.training.optimizer import Optimizer


class SiteBatches(Iterator[Batch]):
    """Endless shuffled mini-batches, on the device, all of one size."""

    def __init__(self, trainer: Trainer, part: ImageSet, rng: torch.Generator) -> None:
        self._trainer, self._part, self._rng = trainer, part, rng
        self._indices = trainer.indices(part, rng)

    @property
    def image_bytes(self) -> int:
        """Bytes of the images of one batch, as float32; of what frozen layers give for them, where that is used."""
        return 4 * min(self._trainer.optimizer.batch_size, len(self._part)) * self._trainer.image_size(self._part)

    def __next__(self) -> Batch:
        return self._trainer.batch(self._part, next(self._indices), self._rng)

    def take(self, count: int) -> list[Batch]:
        """The next `count` of them: the same draws in the same order, but images are fetched and changed together. On
        a GPU that is a few kernels for all of them."""
        kinds, indices, drawn = self._trainer.optimizer.augment, [], []
        for index in itertools.islice(self._indices, count):
            indices.append(index)
            drawn.append(draw_changes(len(index), kinds, self._rng))
        images, targets = self._trainer.changed_batch(self._part, indices, Changes.joined(drawn))
        sizes = [len(index) for index in indices]
        return list(zip(images.split(sizes), targets.split(sizes), strict=True))


def take_batches(batches: Iterator[Batch], count: int, most: Callable[[int], int]) -> list[Batch]:
    """The next batches of any source, at most `count`: as many as `most` says of the bytes of the images of one. None
    where the source has ended."""
    if isinstance(batches, SiteBatches):
        return batches.take(min(count, most(batches.image_bytes)))
    found = list(itertools.islice(batches, 1))
    return [*found, *itertools.islice(batches, min(count, most(found[0][0].nbytes)) - 1)] if found else []


def shuffled_indices(part: ImageSet, optimizer: Optimizer, rng: torch.Generator) -> Iterator[Tensor]:
    """Endless shuffled mini-batches as indices of images, int64 [B].

    Each pass is a new permutation; its incomplete last batch is left out, as floor(|D| / b) has it. With
    `balanced_batches` a pass draws as many images with replacement, the classes alike.
    """
    size = min(optimizer.batch_size, len(part))
    shares = class_shares(part.labels) if optimizer.balanced_batches else None
    while True:
        if shares is None:
            order = torch.randperm(len(part), generator=rng)
        else:
            order = torch.multinomial(shares, len(part), replacement=True, generator=rng)
        yield from order[: len(part) // size * size].split(size)


def class_shares(labels: np.ndarray) -> Tensor:
    """A weight for each image, float64 [N], by which every class that occurs is drawn equally often."""
    _, members, counts = np.unique(labels, return_inverse=True, return_counts=True)
    return torch.from_numpy(1.0 / counts[members])


@dataclass(frozen=True)
class ReplayedBatches:
    """An endless stream of replayed mini-batches, `size` images each."""

    stream: Iterator[Batch]
    size: int

    def join(self, real: Iterator[Batch]) -> Iterator[Batch]:
        """Each real mini-batch with the next replayed one behind it."""
        for (images, targets), (more, others) in zip(real, self.stream, strict=False):
            yield torch.cat([images, more]), torch.cat([targets, others])
