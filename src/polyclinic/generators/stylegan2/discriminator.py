"""StyleGAN2's discriminator: residual, with the spread of a batch as a feature, and conditioned by projection."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.generators.labels import LabelEmbedding
from polyclinic.generators.stylegan2.layers import EPS, GAIN, Conv, Linear, activate, unit
from polyclinic.generators.stylegan2.networks import FIRST_SIDE, StyleGAN2Shape, slow_layers

#: images whose spread is taken together
GROUP = 4


class Block(nn.Module):
    """Feature maps to those of half the side: two convolutions, and a shortcut of one."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = Conv(inputs, inputs, 3, gain=GAIN)
        # the sum of two has twice the variance of one: both are scaled by the root of a half
        self.reduce = Conv(inputs, outputs, 3, down=True, gain=GAIN * math.sqrt(0.5))
        self.shortcut = Conv(inputs, outputs, 1, down=True, bias=False, gain=math.sqrt(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce.active(self.conv.active(x)) + self.shortcut(x)


class Spread(nn.Module):
    """Adds a channel: the standard deviation over GROUP images that follow each other, one number for each group.

    It lets the discriminator notice images that are all alike. It also makes the gradient of one image depend on
    others, so that a network with this layer cannot be trained with differential privacy.
    """

    mixes_samples = True

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        size = math.gcd(batch, GROUP)
        groups = x.float().reshape(batch // size, size, channels, height, width)
        spread = (groups.var(1, unbiased=False) + EPS).sqrt().mean((1, 2, 3))
        plane = spread[:, None].expand(-1, size).reshape(batch, 1, 1, 1).expand(-1, 1, height, width)
        return torch.cat([x, plane.to(x.dtype)], 1)


class Features(nn.Module):
    """Images [B, C, size, size] in [-1, 1] to features [B, width]: all of a discriminator but its last layer."""

    def __init__(self, shape: StyleGAN2Shape, *, spread: bool = True) -> None:
        super().__init__()
        sides = shape.sides[::-1]
        self.widths = [shape.wide(side) for side in sides]
        last = self.widths[-1]
        self.from_image = Conv(shape.channels, self.widths[0], 1, gain=GAIN)
        self.blocks = nn.ModuleList(Block(*pair) for pair in itertools.pairwise(self.widths))
        self.spread = Spread() if spread else nn.Identity()
        self.last = Conv(last + spread, last, 3, gain=GAIN)
        self.dense = Linear(last * FIRST_SIDE**2, last, gain=GAIN)

    def features(self, images: Tensor) -> Tensor:
        x = self.from_image.active(images)
        for block in self.blocks:
            x = block(x)
        x = self.last.active(self.spread(x))
        return activate(self.dense(x.flatten(1)))


class Discriminator(Features):
    """Images [B, C, size, size] in [-1, 1] and labels [B] to scores [B], without a bound."""

    def __init__(self, shape: StyleGAN2Shape) -> None:
        super().__init__(shape)
        self.score = Linear(self.widths[-1], shape.latent)
        self.label = LabelEmbedding(shape.target, shape.latent)
        self.label_layers = slow_layers([shape.latent] * (shape.label_layers + 1))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.features(images)
        known = unit(self.label(labels).float())
        for layer in self.label_layers:
            known = activate(layer(known)).float()
        return (self.score(x).float() * known).sum(1) / math.sqrt(known.shape[1])


class SiteDiscriminator(Features):
    """The same network with an output for each site and without labels: images to logits [B, sites].

    It has no spread, as its batches hold images of all sites. Images that are smaller than the network's side are
    enlarged by repeating their border, as real ones are.
    """

    def __init__(self, shape: StyleGAN2Shape, sites: int) -> None:
        super().__init__(shape, spread=False)
        self.side = shape.size
        self.score = Linear(self.widths[-1], sites)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        missing = self.side - images.shape[-1]
        if missing:
            images = F.pad(images, (0, missing, 0, missing), mode="replicate")
        return self.score(self.features(images)).float()
