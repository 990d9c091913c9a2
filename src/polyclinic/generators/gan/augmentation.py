"""Differentiable augmentation (Zhao et al. 2020): a discriminator sees real and fake images through the same changes.

It then cannot learn few images by heart, and since the changes have gradients, the generator learns through them.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
