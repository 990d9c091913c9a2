"""The attacker's own images, which the threat model grants (`similar-images`): who they belong to is a setting.

Of a simulated run they are other sites' held-out images. A deployed site has no other site's: then half of its own
held-out images stand for them. Phantoms, drawn by Polyclinic, or any source of data can take their place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from polyclinic.attacks.attack import Capability
from polyclinic.audits.views import Tools, Truth
from polyclinic.data.datasets import SOURCES
from polyclinic.errors import BadInput
from polyclinic.randomness import torch_rng
from polyclinic.settings import nearest
from polyclinic.study.audit_settings import Audit

PHANTOMS = ("chest-phantom", "hand-phantom", "brain-phantom")
FEWEST = 8  #: with fewer images nobody trains a decoder
TIMES = 4  #: as many images as this times the budget's candidates
APART = 0.05  #: deviation of the noise that makes images to start from differ


@dataclass(frozen=True)
class AttackerImages:
    """Images [M, C, H, W] in [0, 1], whose they are in words, and held-out images of the site that are left to compare
    with."""

    images: Tensor
    words: str
    held_out: Tensor


def attacker_images(tools: Tools, site: str, truth: Truth) -> AttackerImages:
    """What the study's `audit.own_images` names; no images where there are none."""
    wanted = (tools.assembly.study.audit or Audit()).own_images
    held_out = truth.held_out(tools.effort.candidates)[0].float() / 255
    most = TIMES * tools.effort.candidates
    if wanted == "auto":
        others = _other_sites(tools, site, most)
        wanted = "other-sites" if len(others) >= FEWEST else "held-out"
    if wanted == "other-sites":
        return AttackerImages(_other_sites(tools, site, most), "held-out images of the other sites", held_out)
    if wanted == "held-out":
        words = "half of the site's own held-out images, which stand for images of another hospital"
        return AttackerImages(held_out[::2], words, held_out[1::2])
    names = PHANTOMS if wanted == "phantoms" else (wanted,)
    return AttackerImages(_of_sources(tools, names, most), f"images of {', '.join(names)}", held_out)


@dataclass(frozen=True)
class Start:
    """Images [count, C, H, W] to start a search from; the attacker's own [M, C, H, W], and whose these are."""

    images: Tensor
    own: Tensor
    words: str


def images_to_start_from(tools: Tools, site: str, truth: Truth, count: int) -> Start | None:
    """Where a search for `count` images begins: at the mean of the attacker's own; None where the threat model grants
    none, or there are too few.

    A start that looks like an image is worth more than a longer search: 500 steps from here gave 32 dB where 1,000 from
    noise gave 25 (LeNet-5, one image of 28 px).
    """
    if Capability.SIMILAR_IMAGES not in tools.threat.granted:
        return None
    own = attacker_images(tools, site, truth)
    if len(own.images) < FEWEST:
        return None
    return Start(start_near(own.images, count, tools.seed), own.images, own.words)


def start_near(own: Tensor, count: int, seed: int) -> Tensor:
    """`count` images near the mean of the attacker's own [M, C, H, W], a little different from each other."""
    noise = torch.randn(count, *own.shape[1:], generator=torch_rng(seed, "audit", "images to start from"))
    return (own.mean(0) + APART * noise).clamp(0, 1)


def _other_sites(tools: Tools, site: str, most: int) -> Tensor:
    if tools.assembly.open_data is not None:  # a deployed site has its own images alone
        return torch.zeros(0, *tools.image_shape)
    others = [tools.site_data(name) for name in tools.assembly.prepared.names if name != site]
    parts = [np.array(part.images) for data in others for part in (data.validation, data.test) if len(part)]
    if not parts:
        return torch.zeros(0, *tools.image_shape)
    images = torch.from_numpy(np.concatenate(parts))
    chosen = torch.randperm(len(images), generator=torch_rng(tools.seed, "audit", "attacker's images"))[:most]
    return images[chosen].float() / 255


def _of_sources(tools: Tools, names: tuple[str, ...], most: int) -> Tensor:
    channels, *size = tools.image_shape
    found = [_load(name, most // len(names), size[0], tools.seed) for name in names]
    resized = [F.interpolate(images, size=size, mode="bilinear", antialias=True) for images in found]
    return torch.cat([_in_channels(images, channels) for images in resized])


def _load(name: str, count: int, size: int, seed: int) -> Tensor:
    if name not in SOURCES:
        hint = nearest(name, list(SOURCES))
        raise BadInput(
            f"audit.own_images: no such choice: '{name}'{hint}; write auto, other-sites, held-out, phantoms, none or a "
            "source of `polyclinic data list`"
        )
    drawn = {"samples": count, "seed": seed + 1, "size": size}
    source = SOURCES[name]
    settings = {field: value for field, value in drawn.items() if field in source.model_fields}
    images = torch.from_numpy(np.array(source.model_validate({"source": name, **settings}).load().images[:count]))
    return images.float() / 255


def _in_channels(images: Tensor, channels: int) -> Tensor:
    if images.shape[1] == channels:
        return images
    return images.mean(1, keepdim=True).expand(-1, channels, -1, -1)
