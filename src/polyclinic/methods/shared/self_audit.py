"""A site's audit of its own generator, before anything leaves: is a training image remembered?

The site has images that the generator never saw: its validation images. Had the generator learned nothing of single
patients, those could be exchanged with the training images. Four questions, each with an exact test over patients or a
limit of its own: are samples nearer to training images; are training images nearer to samples; is the loss of training
images lower, at any of several levels of noise; is a sample a copy of one, mirrored, turned, cut out, larger or
smaller? What was found stays with the site's own people; the verdict is one word.
"""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from polyclinic.attacks.copies import CLOSE_SHARE, COPY_FACTOR, closer_to_training
from polyclinic.attacks.copies import FEWEST as FEWEST
from polyclinic.attacks.near_copies import CopyIndex
from polyclinic.generators.base import MOST_PICTURE_CHANNELS, GeneratorModel, as_tensor, without_mask
from polyclinic.metrics.perceptual import Pixels, table
from polyclinic.metrics.statistics.significance import chance_of_order
from polyclinic.randomness import torch_rng

if TYPE_CHECKING:
    from polyclinic.data.parts import ImageSet

#: the chance that a generator that remembers nothing is stopped, over all looks at it
LEVEL = 0.01
TESTS = 4
#: images of each kind that are looked at
MOST = 400
#: sides of the middle of a sample that is enlarged, and of a sample that is made smaller
ZOOMS = (0.85, 1.15)


@dataclass(frozen=True)
class Learned:
    """What a generator learned or might have: bytes [N, C, H, W], labels [N] and patients [N], where they are known."""

    rows: Tensor
    labels: Tensor
    cases: np.ndarray | None

    @classmethod
    def some(cls, rows: Any, part: "ImageSet", seed: int) -> "Learned":
        """Of a part whose images are learned as `rows`: all, or so many by lot."""
        index = torch.randperm(len(part), generator=torch_rng(seed, "self-audit"))[:MOST].sort().values.numpy()
        cases = None if part.cases is None else np.asarray(part.cases)[index]
        return cls(as_tensor(rows[index]), as_tensor(np.array(part.labels[index])), cases)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class Look:
    """Chances of what was seen, by question, the level below which one counts, and samples that are copies."""

    chances: dict[str, float]
    level: float
    copies: int

    @property
    def found(self) -> bool:
        return self.copies > 0 or min(self.chances.values()) <= self.level

    def to_json(self) -> str:
        seen: dict[str, Any] = {"found": self.found, "copies": self.copies, "level": self.level}
        return json.dumps(seen | {"chances": self.chances}, indent=1)


def look(
    made: Tensor,
    train: Learned,
    held_out: Learned,
    *,
    model: GeneratorModel | None = None,
    looks: int = 1,
    seed: int = 0,
) -> Look:
    """Search samples uint8 [M, C, H, W] and a generator's losses for training images; one of so many looks. Without a
    model only samples are looked at."""
    level = LEVEL / (TESTS * max(1, looks))
    pictures = made.shape[1] <= MOST_PICTURE_CHANNELS
    samples, members, others = (
        without_mask(one) if pictures else one for one in (made[:MOST], train.rows, held_out.rows)
    )
    near, far = _distances(samples, members, pictures), _distances(samples, others, pictures)
    known = (train.cases, held_out.cases) if train.cases is not None and held_out.cases is not None else None
    chances = {
        "samples are nearer to training images": closer_to_training(near, far, seed, known)[1],
        "training images are nearer to samples": chance_of_order(
            -near.amin(0), -far.amin(0), train.cases, held_out.cases
        ),
    }
    if (chance := _chance_of_losses(model, train, held_out, seed)) is not None:
        chances["training images have a lower loss"] = chance
    usual = _distances(others, members, pictures).amin(1).quantile(CLOSE_SHARE, interpolation="lower")
    copies = near.amin(1) < COPY_FACTOR * usual
    if pictures:
        index, ways = CopyIndex(members, others), [samples, *(_zoomed(samples, share) for share in ZOOMS)]
        for one in ways:
            copies |= index.search(one, among=len(ways) * len(samples), level=level).is_copy
    return Look(chances, level, int(copies.sum()))


def _distances(one: Tensor, other: Tensor, pictures: bool) -> Tensor:
    """Distances [N, M] of pictures, over flips and quarter turns, or of features."""
    if pictures:
        return table(one, other, Pixels()).distances
    return torch.cdist(one.flatten(1).float(), other.flatten(1).float()).square()


def _chance_of_losses(model: GeneratorModel | None, train: Learned, held_out: Learned, seed: int) -> float | None:
    """The chance of the losses at the level of noise that tells most, corrected for the number of levels; None where a
    generator has no such losses."""
    address = (seed, "self-audit", "losses")  # the same noise for all
    found = [model.losses(one.rows, one.labels, torch_rng(*address)) for one in (train, held_out)] if model else []
    own, other = (*found, None, None)[:2]
    if own is None or other is None:
        return None
    pairs = zip(own.T, other.T, strict=True)
    return min(1.0, own.shape[1] * min(chance_of_order(-a, -b, train.cases, held_out.cases) for a, b in pairs))


def _zoomed(images: Tensor, share: float) -> Tensor:
    """The middle of images, enlarged; or for a share above 1 the images made smaller, with their border around them."""
    size, units = images.shape[-1], images.float()
    if share < 1:
        cut = round(size * (1 - share) / 2)
        units = units[..., cut : size - cut, cut : size - cut]
    else:
        pad = round(size * (share - 1) / 2)
        units = F.pad(units, (pad, pad, pad, pad), mode="replicate")
    return F.interpolate(units, (size, size), mode="bilinear", antialias=True).round().to(torch.uint8)
