"""Random augmentation of training images, on the device they lie on: shape (flip, turn, crop, rotate), grey values
(brightness, contrast, noise), and mixup.

Every change but mixup is drawn for each image by itself, so that differential privacy can bound what one image does.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from polyclinic.randomness import device_rng, numpy_rng
from polyclinic.training import image_draws

#: names of `optimizer.augment`
Augmentation = Literal["flip", "turn", "crop", "rotate", "brightness", "contrast", "noise", "mixup"]
AUGMENTATIONS: tuple[str, ...] = get_args(Augmentation)

#: the smallest side of a cropped window, as a share of the image's side
SMALLEST_CROP = 0.7
#: the largest rotation to either side, in degrees
MOST_DEGREES = 15.0
#: the largest number that is added to all grey values, which lie in [0, 1]
MOST_BRIGHTNESS = 0.15
#: contrast is multiplied by a factor between 1 / MOST_CONTRAST and MOST_CONTRAST
MOST_CONTRAST = 1.3
#: the largest standard deviation of the noise
MOST_NOISE = 0.05
#: of the beta distribution that the shares of two mixed images come from (Zhang et al. 2018 recommend 0.1 to 0.4)
MIXUP_ALPHA = 0.2

#: a generator; or a seed for each image, int64 [B], where the draws of an image must not depend on other images
Draws = torch.Generator | Tensor


@dataclass(frozen=True)
class Changes:
    """What was drawn for the images of a batch, by kinds of augmentation; None for kinds that are not wanted."""

    flips: Tensor | None = None  #: bool [B]
    turns: Tensor | None = None  #: quarters, int64 [B]
    affine: Tensor | None = None  #: see `_affine`
    grey_values: Tensor | None = None  #: in [-1, 1), for contrast, brightness and noise: [B, 3]
    noise: tuple[tuple[int, int], ...] = ()  #: so many images have noise from this seed, one after the other

    @classmethod
    def joined(cls, some: "Sequence[Changes]") -> "Changes":
        """The changes of several batches, drawn for the same kinds, as those of one."""
        names = [name for name in ("flips", "turns", "affine", "grey_values") if getattr(some[0], name) is not None]
        tensors = {name: torch.cat([getattr(one, name) for one in some]) for name in names}
        return cls(**tensors, noise=tuple(itertools.chain.from_iterable(one.noise for one in some)))


def augment(
    images: Tensor, masks: Tensor | None, kinds: tuple[str, ...], draws: Draws | Changes
) -> tuple[Tensor, Tensor | None]:
    """Change each image [B, C, H, W] by a draw of its own (or by what was drawn for it), its mask [B, H, W] with it.
    Mixup is `mix`'s work."""
    drawn = draws if isinstance(draws, Changes) else draw_changes(len(images), kinds, draws)
    if drawn.flips is not None:
        chosen = drawn.flips.to(images.device, non_blocking=True)
        images = torch.where(chosen[:, None, None, None], images.flip(-1), images)
        masks = masks if masks is None else torch.where(chosen[:, None, None], masks.flip(-1), masks)
    if drawn.turns is not None:
        turns = drawn.turns.to(images.device, non_blocking=True)
        for quarter in (1, 2, 3):
            chosen = turns == quarter
            images = torch.where(chosen[:, None, None, None], images.rot90(quarter, (-2, -1)), images)
            if masks is not None:
                masks = torch.where(chosen[:, None, None], masks.rot90(quarter, (-2, -1)), masks)
    if drawn.affine is not None:
        images, masks = _resample(images, masks, drawn.affine)
    if drawn.grey_values is not None:
        images = _grey_values(images, kinds, drawn.grey_values, drawn.noise)
    return images, masks


def draw_changes(count: int, kinds: tuple[str, ...], draws: Draws) -> Changes:
    """Draw for so many images, on the CPU."""
    flips = turns = affine = grey_values = None
    noise: tuple[tuple[int, int], ...] = ()
    if "flip" in kinds:
        flips = draws % 2 == 1 if isinstance(draws, Tensor) else torch.rand(count, generator=draws) < 0.5
    if "turn" in kinds:
        turns = draws // 2 % 4 if isinstance(draws, Tensor) else torch.randint(4, (count,), generator=draws)
    if count and {"crop", "rotate"} & set(kinds):
        affine = _affine(count, kinds, draws)
    if count and {"brightness", "contrast", "noise"} & set(kinds):
        grey_values = _uniform(count, 3, draws, "grey values")
    if count and "noise" in kinds:
        if isinstance(draws, Tensor):
            noise = tuple((1, seed) for seed in draws.tolist())
        else:
            noise = ((count, int(torch.randint(2**62, (), generator=draws))),)
    return Changes(flips, turns, affine, grey_values, noise)


def mix(images: Tensor, targets: Tensor, draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """Mixup (Zhang et al. 2018): each image with another of the batch, and their targets in the same shares.

    Targets must be numbers that can be mixed: `Task.mixable` makes them of classes.
    """
    seed = int(torch.randint(2**62, (), generator=draws))
    share = torch.from_numpy(numpy_rng(seed, "mixup").beta(MIXUP_ALPHA, MIXUP_ALPHA, len(images)))
    other = torch.randperm(len(images), generator=draws).to(images.device, non_blocking=True)

    def between(first: Tensor) -> Tensor:
        weight = share.to(first, non_blocking=True).reshape(-1, *(1 for _ in first.shape[1:]))
        return weight * first + (1 - weight) * first[other]

    return between(images), between(targets)


def _uniform(count: int, numbers: int, draws: Draws, purpose: str) -> Tensor:
    """Numbers in [-1, 1) for each image, [B, numbers]."""
    if isinstance(draws, Tensor):
        return 2 * image_draws.uniform(draws, numbers, purpose=purpose) - 1
    return 2 * torch.rand(count, numbers, generator=draws) - 1


def _affine(count: int, kinds: tuple[str, ...], draws: Draws) -> Tensor:
    """For each image the map from places of the new image to places of the old one, [B, 2, 3], in [-1, 1]."""
    drawn = _uniform(count, 4, draws, "shape")
    side = torch.ones(count) - (1 - SMALLEST_CROP) * (drawn[:, 0] + 1) / 2 * ("crop" in kinds)
    angle = math.radians(MOST_DEGREES) * drawn[:, 1] * ("rotate" in kinds)
    middle = drawn[:, 2:] * (1 - side)[:, None]  # as far as the window stays inside the image
    cosine, sine = side * angle.cos(), side * angle.sin()
    rows = [torch.stack([cosine, -sine, middle[:, 0]], 1), torch.stack([sine, cosine, middle[:, 1]], 1)]
    return torch.stack(rows, 1)


def _resample(images: Tensor, masks: Tensor | None, affine: Tensor) -> tuple[Tensor, Tensor | None]:
    """Images between pixels, masks at the nearest one; what lies outside is a reflection."""
    grid = F.affine_grid(affine.to(images, non_blocking=True), list(images.shape), align_corners=False)
    new = F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
    if masks is None:
        return new, None
    moved = F.grid_sample(masks[:, None].to(grid), grid, mode="nearest", padding_mode="reflection", align_corners=False)
    return new, moved[:, 0].to(masks.dtype)


def _grey_values(images: Tensor, kinds: tuple[str, ...], values: Tensor, noise: Sequence[tuple[int, int]]) -> Tensor:
    """Other contrast around the image's own mean, then brightness, then noise; within [0, 1] again."""
    drawn = values.to(images, non_blocking=True)[:, :, None, None, None]
    if "contrast" in kinds:
        mean = images.mean((1, 2, 3), keepdim=True)
        images = mean + (images - mean) * MOST_CONTRAST ** drawn[:, 0]
    if "brightness" in kinds:
        images = images + MOST_BRIGHTNESS * drawn[:, 1]
    if "noise" in kinds:
        like = images[:1]
        parts = [
            torch.randn(
                (rows, *like.shape[1:]),
                generator=device_rng(like.device, seed, "noise"),
                dtype=like.dtype,
                device=like.device,
            )
            for rows, seed in noise
        ]
        images = images + MOST_NOISE * (drawn[:, 2] + 1) / 2 * torch.cat(parts)
    return images.clamp(0, 1)
