"""Random augmentation of training images, on the device they lie on: shape (flip, turn, crop, rotate), grey values
(brightness, contrast, noise), and mixup.

Every change but mixup is drawn for each image by itself, so that differential privacy can bound what one image does.
"""

import math
from typing import Any, Literal, get_args

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


def augment(images: Tensor, masks: Tensor | None, kinds: tuple[str, ...], draws: Draws) -> tuple[Tensor, Tensor | None]:
    """Change each image [B, C, H, W] by a draw of its own, its mask [B, H, W] with it. Mixup is `mix`'s work."""
    count, chosen = len(images), set(kinds)
    if "flip" in chosen:
        flips = draws % 2 == 1 if isinstance(draws, Tensor) else torch.rand(count, generator=draws) < 0.5
        flips = flips.to(images.device, non_blocking=True)
        images = torch.where(flips[:, None, None, None], images.flip(-1), images)
        masks = masks if masks is None else torch.where(flips[:, None, None], masks.flip(-1), masks)
    if "turn" in chosen:
        turns = draws // 2 % 4 if isinstance(draws, Tensor) else torch.randint(4, (count,), generator=draws)
        turns = turns.to(images.device, non_blocking=True)
        for quarter in (1, 2, 3):
            here = turns == quarter
            images = torch.where(here[:, None, None, None], images.rot90(quarter, (-2, -1)), images)
            if masks is not None:
                masks = torch.where(here[:, None, None], masks.rot90(quarter, (-2, -1)), masks)
    if count and {"crop", "rotate"} & chosen:
        images, masks = _resample(images, masks, _affine(count, kinds, draws))
    if count and {"brightness", "contrast", "noise"} & chosen:
        images = _grey_values(images, kinds, draws)
    return images, masks


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


def _grey_values(images: Tensor, kinds: tuple[str, ...], draws: Draws) -> Tensor:
    """Other contrast around the image's own mean, then brightness, then noise; within [0, 1] again."""
    values = _uniform(len(images), 3, draws, "grey values")
    drawn = values.to(images, non_blocking=True)[:, :, None, None, None]
    if "contrast" in kinds:
        mean = images.mean((1, 2, 3), keepdim=True)
        images = mean + (images - mean) * MOST_CONTRAST ** drawn[:, 0]
    if "brightness" in kinds:
        images = images + MOST_BRIGHTNESS * drawn[:, 1]
    if "noise" in kinds:
        if isinstance(draws, Tensor):
            seeds, rows = draws.tolist(), 1
        else:  # one for all images
            seeds, rows = [int(torch.randint(2**62, (), generator=draws))], len(images)
        how: dict[str, Any] = {"dtype": images.dtype, "device": images.device}
        shape = (rows, *images.shape[1:])
        noise = [torch.randn(shape, generator=device_rng(images.device, one, "noise"), **how) for one in seeds]
        images = images + MOST_NOISE * (drawn[:, 2] + 1) / 2 * torch.cat(noise)
    return images.clamp(0, 1)
