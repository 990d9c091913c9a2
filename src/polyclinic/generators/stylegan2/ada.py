"""Adaptive discriminator augmentation (Karras et al. 2020b): the discriminator sees images changed as needed.

Each change is made with a probability p, so that below some p it cannot leak into what the generator makes. p begins at
0 and follows how surely the discriminator recognises the images it has been trained on.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from polyclinic.generators.base import RandomSource


def augmented(images: Tensor, p: Tensor, random: RandomSource) -> Tensor:
    """Images [B, C, H, W] in [-1, 1], each change made with probability p []; has gradients for the generator.

    Pixels beyond the border are those of the image mirrored there.
    """
    if not images.is_cuda and float(p) <= 0:  # a GPU is not asked for p, which would make it wait
        return images
    moves, colours = _moves(images, p, random), _colours(images, p, random)
    grid = F.affine_grid(moves[:, :2], list(images.shape), align_corners=False)
    moved = F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="reflection", align_corners=False)
    return recoloured(moved, colours)


# --- geometry -----------------------------------------------------------------------------------------


def _moves(images: Tensor, p: Tensor, random: RandomSource) -> Tensor:
    """A 3x3 matrix for each image, from places in the new one to places in the old, in units of half a side."""
    count, side = len(images), images.shape[-1]
    draw = Draws(count, p, random)
    flip = draw.chosen(1.0 - 2.0 * random.integers(2, count).float(), 1.0)
    matrix = _scaling(flip, torch.ones_like(flip))
    matrix = matrix @ _rotation(draw.chosen(random.integers(4, count).float() * (math.pi / 2), 0.0))
    shift = (random.uniform(count, 2) * 2 - 1) * 0.125
    whole = (shift * side).round() * (2 / side)  # by whole pixels
    matrix = matrix @ _translation(draw.chosen(whole, 0.0))
    grown = draw.chosen(torch.exp2(0.2 * random.normal(count)), 1.0)
    matrix = matrix @ _scaling(grown, grown)
    # a rotation before and one after the stretching, so that at least one of the two happens with probability p
    draw.p = 1 - (1 - p).sqrt()
    matrix = matrix @ _rotation(draw.chosen((random.uniform(count) * 2 - 1) * math.pi, 0.0))
    draw.p = p
    stretched = draw.chosen(torch.exp2(0.2 * random.normal(count)), 1.0)
    matrix = matrix @ _scaling(stretched, 1 / stretched)
    draw.p = 1 - (1 - p).sqrt()
    matrix = matrix @ _rotation(draw.chosen((random.uniform(count) * 2 - 1) * math.pi, 0.0))
    draw.p = p
    return matrix @ _translation(draw.chosen(0.25 * random.normal(count, 2), 0.0))


class Draws:
    """Chooses, for each image, between a drawn value and the one that changes nothing."""

    def __init__(self, count: int, p: Tensor, random: RandomSource) -> None:
        self.count, self.p, self.random = count, p, random

    def chosen(self, drawn: Tensor, neutral: float) -> Tensor:
        made = self.random.uniform(self.count) < self.p
        # not `neutral` itself: a number would be copied to the GPU, which cannot be recorded
        return torch.where(made.reshape(-1, *[1] * (drawn.dim() - 1)), drawn, torch.full_like(drawn, neutral))


def _scaling(x: Tensor, y: Tensor) -> Tensor:
    return torch.diag_embed(torch.stack([x, y, torch.ones_like(x)], 1))


def _rotation(angle: Tensor) -> Tensor:
    cos, sin, one = angle.cos(), angle.sin(), torch.ones_like(angle)
    zero = torch.zeros_like(angle)
    return torch.stack([cos, -sin, zero, sin, cos, zero, zero, zero, one], 1).reshape(-1, 3, 3)


def _translation(by: Tensor) -> Tensor:
    matrix = torch.eye(3, device=by.device).repeat(len(by), 1, 1)
    matrix[:, :2, 2] = by
    return matrix


# --- colour -------------------------------------------------------------------------------------------


def recoloured(images: Tensor, matrix: Tensor) -> Tensor:
    """Colours [B, C, H, W] through a 4x4 matrix each; of grey images only the mean of what it does to the channels.

    A mask, the last of two or of four channels, has no colour and stays as it is.
    """
    if images.shape[1] in (2, 4):
        return torch.cat([recoloured(images[:, :-1], matrix), images[:, -1:]], 1)
    linear, offset = matrix[:, :3, :3], matrix[:, :3, 3]
    if images.shape[1] == 1:
        factor = linear.sum(2).mean(1)
        return images * factor[:, None, None, None] + offset.mean(1)[:, None, None, None]
    mixed = torch.einsum("bij,bjhw->bihw", linear, images)
    return mixed + offset[:, :, None, None]


def _colours(images: Tensor, p: Tensor, random: RandomSource) -> Tensor:
    """A 4x4 matrix for each image: brightness, contrast, inverted luma, hue and saturation."""
    count, device = len(images), random.device
    draw = Draws(count, p, random)
    matrix = torch.eye(4, device=device).repeat(count, 1, 1)
    matrix[:, :3, 3] = draw.chosen(0.2 * random.normal(count), 0.0)[:, None]
    contrast = draw.chosen(torch.exp2(0.5 * random.normal(count)), 1.0)
    matrix = _scaled(contrast) @ matrix
    along, colourless, _ = _greys(device)
    keep = torch.eye(4, device=device)
    inverted = draw.chosen(random.integers(2, count).float(), 0.0)
    matrix = (keep - 2 * along * inverted[:, None, None]) @ matrix
    if images.shape[1] <= 2:  # grey, perhaps with a mask
        return matrix
    turned = draw.chosen((random.uniform(count) * 2 - 1) * math.pi, 0.0)
    matrix = _turned(turned) @ matrix
    saturation = draw.chosen(torch.exp2(random.normal(count)), 1.0)
    return (colourless + (keep - colourless) * saturation[:, None, None]) @ matrix


def _scaled(factor: Tensor) -> Tensor:
    return torch.diag_embed(torch.stack([factor, factor, factor, torch.ones_like(factor)], 1))


def _turned(angle: Tensor) -> Tensor:
    """Rotations of colours by `angle` [B] about the axis of greys (Rodrigues' formula)."""
    *_, cross = _greys(angle.device)
    sin, cos = angle.sin()[:, None, None], angle.cos()[:, None, None]
    matrix = torch.eye(4, device=angle.device).repeat(len(angle), 1, 1)
    matrix[:, :3, :3] = torch.eye(3, device=angle.device) + sin * cross + (1 - cos) * (cross @ cross)
    return matrix


@functools.cache
def _greys(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """About the axis of greys: what projects colours onto it ([4, 4], without and with the constant), and the cross
    product with it [3, 3]. Kept, as a recorded step must not fetch numbers."""
    along = torch.zeros(4, 4)
    along[:3, :3] = 1 / 3
    signs = torch.tensor([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]])
    constant = torch.diag(torch.tensor([0.0, 0.0, 0.0, 1.0]))
    return along.to(device), (along + constant).to(device), (signs / math.sqrt(3)).to(device)
