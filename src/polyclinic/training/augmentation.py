"""Random augmentation of training images: flips and quarter turns."""

from __future__ import annotations

import torch
from torch import Tensor


def augment(
    images: Tensor, masks: Tensor | None, kinds: tuple[str, ...], draws: torch.Generator | Tensor
) -> tuple[Tensor, Tensor | None]:
    """Flip and turn each image by a draw of its own, its mask with it.

    `draws` is a generator, or a seed for each image, int64 [B], where its draw must not depend on other images.
    """
    count = len(images)
    if "flip" in kinds:
        chosen = _flips(count, draws).to(images.device)
        images = torch.where(chosen[:, None, None, None], images.flip(-1), images)
        masks = masks if masks is None else torch.where(chosen[:, None, None], masks.flip(-1), masks)
    if "turn" in kinds:
        turns = _turns(count, draws).to(images.device)
        for quarter in (1, 2, 3):
            chosen = turns == quarter
            images = torch.where(chosen[:, None, None, None], images.rot90(quarter, (-2, -1)), images)
            if masks is not None:
                masks = torch.where(chosen[:, None, None], masks.rot90(quarter, (-2, -1)), masks)
    return images, masks


def _flips(count: int, draws: torch.Generator | Tensor) -> Tensor:
    return draws % 2 == 1 if isinstance(draws, Tensor) else torch.rand(count, generator=draws) < 0.5


def _turns(count: int, draws: torch.Generator | Tensor) -> Tensor:
    return draws // 2 % 4 if isinstance(draws, Tensor) else torch.randint(4, (count,), generator=draws)
