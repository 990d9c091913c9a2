"""Mini-batches for a GAN: real images in [-1, 1] in shuffled passes or balanced by class, and labels for fake ones.

Augmentation: the discriminator sees real and fake images through the same changes. It then cannot learn few images by
heart, and since the changes have gradients, the generator learns through them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from polyclinic.federation.collaborators import Batch
from polyclinic.generators.base import RandomSource, as_tensor
from polyclinic.generators.labels import check_labels
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


# --- differentiable augmentation (Zhao et al. 2020) -----------------------------------------------


DRAWS = 7  # random numbers an image needs


def augment(images: Tensor, draws: Tensor) -> Tensor:
    """Images [..., C, H, W] in [-1, 1], each brightened, its contrast and colour changed, shifted and partly blanked.

    `draws` [..., DRAWS] are uniform in [0, 1).
    """
    flat, numbers = images.reshape(-1, *images.shape[-3:]), draws.reshape(-1, DRAWS)
    changed = cut(shifted(coloured(flat, numbers[:, :3]), numbers[:, 3:5]), numbers[:, 5:7])
    return changed.reshape(images.shape)


def coloured(images: Tensor, draws: Tensor) -> Tensor:
    brightness, saturation, contrast = (column[:, None, None, None] for column in draws.unbind(1))
    images = images + (brightness - 0.5)
    if images.shape[1] > 1:
        grey = images.mean(1, keepdim=True)
        images = grey + (images - grey) * (2 * saturation)
    middle = images.mean((1, 2, 3), keepdim=True)
    return middle + (images - middle) * (contrast + 0.5)


def shifted(images: Tensor, draws: Tensor) -> Tensor:
    """Moved by up to an eighth of the side in each direction; what comes in is black, as beyond the frame.

    Pixels are gathered by index: unlike a sampled grid, that has second derivatives.
    """
    side = images.shape[-1]
    reach = side // 8
    moves = (draws * (2 * reach + 1)).long() - reach
    for axis, move in ((2, moves[:, 0]), (3, moves[:, 1])):
        at = torch.arange(side, device=images.device)[None] + move[:, None]
        shape = (-1, 1, side, 1) if axis == 2 else (-1, 1, 1, side)
        inside = ((at >= 0) & (at < side)).reshape(shape)
        index = at.clamp(0, side - 1).reshape(shape).expand_as(images)
        images = torch.where(inside, images.gather(axis, index), -1.0)
    return images


def cut(images: Tensor, draws: Tensor) -> Tensor:
    """With a grey square of half the side somewhere."""
    side = images.shape[-1]
    place = torch.arange(side, device=images.device)[None]
    row, column = ((place - (draws[:, k : k + 1] * side).floor()).abs() < side / 4 for k in (0, 1))
    return torch.where((row[:, :, None] & column[:, None, :])[:, None], 0.0, images)
