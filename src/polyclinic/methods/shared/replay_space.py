"""What a generator learns and replay gives back (`replay.space`): images, or latents of the network's frozen layers.

Generators take images of 256 values. Latents are rounded to 256 steps, channel by channel, between limits that phantoms
give: they are about no patient, and the same at all sites. The frozen layers are public, so latents can be decoded:
they are no more private than images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from polyclinic.data.pixels import to_uint8
from polyclinic.federation.collaborators import TrainerLike
from polyclinic.methods.shared.public_basis import PHANTOMS, pictures

if TYPE_CHECKING:
    from polyclinic.federation.site import Site

#: the group of a site's state that has the frozen layers' weights; where its cache has latents and their limits
FRONT, LATENTS, LIMITS = "replay front", "replay latents", "replay limits"
#: phantoms of each kind that give the limits, which lie so many standard deviations from a channel's mean
EACH, DEVIATIONS = 16, 6.0
#: of the median deviation of all channels: a channel that phantoms hardly stir may be a busy one in real images
LEAST_DEVIATION = 0.1
PIECE = 256  # images whose latents are rounded at once


@dataclass(frozen=True)
class Limits:
    """The values of each channel, float32 [C, 1, 1], that become 0 and 255."""

    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, latents: Tensor) -> Limits:
        """Limits around latents [N, C, h, w]."""
        mean, deviation = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
        reach = DEVIATIONS * torch.maximum(deviation, LEAST_DEVIATION * deviation.median()).clamp(min=1e-6)
        return cls((mean - reach)[:, None, None], (mean + reach)[:, None, None])

    def to_bytes(self, latents: np.ndarray) -> Tensor:
        """Latents float [N, C, h, w] as uint8."""
        pieces = (torch.from_numpy(np.array(latents[at : at + PIECE])) for at in range(0, len(latents), PIECE))
        return torch.cat([to_uint8((piece - self.low) / (self.high - self.low)) for piece in pieces])

    def to_latents(self, unit: Tensor) -> Tensor:
        """What `to_bytes` was given, up to rounding, from its bytes over 255."""
        low, high = self.low.to(unit.device), self.high.to(unit.device)
        return low + unit * (high - low)


def take_front(site: Site, weights: Mapping[str, Tensor]) -> None:
    """Keep the frozen layers' weights in the site's state: they are needed before the network comes."""
    site.state.put(FRONT, weights)


def learned(site: Site) -> np.ndarray | Tensor:
    """What the generator learns of the site's training images, uint8 [N, C, H, W]."""
    if not in_latents(site):
        return site.data.train.images
    if LATENTS not in site.cache:
        site.trainer.load(site.state.group(FRONT))
        limits = limits_of(site)
        site.cache[LATENTS] = limits.to_bytes(site.trainer.latents(site.data.train.images))
    return site.cache[LATENTS]


def shape_of(site: Site) -> tuple[int, ...]:
    """The shape [C, H, W] of one image that the generator learns."""
    return tuple(learned(site).shape[1:])


def limits_of(site: Site) -> Limits:
    if LIMITS not in site.cache:
        site.trainer.load(site.state.group(FRONT))
        site.cache[LIMITS] = public_limits(site.trainer, tuple(site.data.train.images.shape[1:]))
    return site.cache[LIMITS]


def public_limits(trainer: TrainerLike, image_shape: tuple[int, ...]) -> Limits:
    """The limits that phantoms of a shape [C, H, W] give, through the frozen layers in the trainer's network."""
    channels, size, _ = image_shape
    grey = [pictures(name, EACH, size).mean(1, keepdims=True).astype(np.uint8) for name in PHANTOMS]
    images = np.concatenate(grey)
    return Limits.of(torch.from_numpy(np.array(trainer.latents(np.repeat(images, channels, axis=1)))))


def in_latents(site: Site) -> bool:
    return getattr(site.replay_settings, "space", "images") == "latents"
