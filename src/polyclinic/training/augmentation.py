"""Random augmentation of training images: flips and quarter turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    pass


def augment(
    images: Tensor, masks: Tensor | None, kinds: tuple[str, ...], rng: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """Flip and turn each image by a draw of its own, its mask with it."""
    count = len(images)
    if "flip" in kinds:
        chosen = (torch.rand(count, generator=rng) < 0.5).to(images.device)
        images = torch.where(chosen[:, None, None, None], images.flip(-1), images)
        masks = masks if masks is None else torch.where(chosen[:, None, None], masks.flip(-1), masks)
    if "turn" in kinds:
        turns = torch.randint(4, (count,), generator=rng).to(images.device)
        for quarter in (1, 2, 3):
            chosen = turns == quarter
            images = torch.where(chosen[:, None, None, None], images.rot90(quarter, (-2, -1)), images)
            if masks is not None:
                masks = torch.where(chosen[:, None, None], masks.rot90(quarter, (-2, -1)), masks)
    return images, masks
