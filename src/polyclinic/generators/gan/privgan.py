"""The convolutional GAN of PrivGAN's public code (Mukherjee et al. 2021), there for CIFAR-10.

FELICIA's paper gives no layers of its GANs; it starts from PrivGAN. Kernels have 5x5 pixels, activations are leaky, and
there is no normalisation.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.generators.gan.networks import (
    SLOPE,
    Architecture,
    Condition,
    GANShape,
    NoiseWithLabel,
    OfEachClass,
)
from polyclinic.generators.gan.settings import GAN
from polyclinic.generators.labels import LabelEmbedding
from polyclinic.tasks import Target

DOUBLINGS = 4
FIRST_SPREAD = 0.02  # standard deviation of the first layer's weights


class PrivGAN(GAN):
    """The `[generator]` table with `name = "privgan"`."""

    name: Literal["privgan"] = "privgan"
    smoothing: float = Field(0.05, ge=0, lt=0.5, description="with loss 'log': what a real image's label lacks to 1")
    condition: Condition = Field(
        "apart",
        description="how the discriminator learns the label: projection, plane (one more channel), apart (each class "
        "has networks of its own), or none: then images are made without regard to labels",
    )
    balance: bool = Field(True, description="draw real batches with as many images of each class a site has")
    average: float = Field(0.0, ge=0, lt=1, description="samples come from this moving average of the generator")
    width: int = Field(64, ge=1, description="channels of the widest feature map; deeper ones have up to 8 times it")
    latent: int = Field(100, ge=1, description="random numbers that an image is made from")

    summary: ClassVar[str] = "the convolutional GAN of PrivGAN's code: 5x5 kernels, no normalisation"
    architecture: ClassVar[Architecture] = "convolutions"

    @model_validator(mode="after")
    def _has_no_norms(self) -> PrivGAN:
        if self.discriminator_norm != "none" or self.spread:
            raise ValueError("privgan has no norms and no spread; set discriminator_norm = 'none', spread = false")
        return self

    def networks(self, shape: GANShape) -> dict[str, nn.Module]:
        generator = _per_class(shape, self.condition, PrivGANGenerator)
        discriminator = _per_class(shape, self.condition, lambda one: PrivGANDiscriminator(one, self.condition, 1))
        average = copy.deepcopy(generator).requires_grad_(False)
        return {"generator": generator, "average": average, "discriminator": discriminator}

    def central_discriminator(
        self, *, channels: int, size: int, target: Target, sites: int, per_class: bool = False
    ) -> nn.Module:
        shape = self.shape(channels, size, target)
        condition: Condition = "apart" if per_class else "none"
        return _per_class(shape, condition, lambda one: PrivGANDiscriminator(one, "none", sites))


def _per_class(shape: GANShape, condition: Condition, build: Callable[[GANShape], nn.Module]) -> nn.Module:
    """One network, or one for each class, none of which is told a label."""
    if condition != "apart":
        return build(shape)
    return OfEachClass(shape.target, lambda: build(shape._replace(target=Target())))


class PrivGANGenerator(nn.Module):
    """Noise [B, latent] and labels [B] to images [B, C, H, W]: a dense layer, then four transposed convolutions."""

    def __init__(self, shape: GANShape) -> None:
        super().__init__()
        side = -(-shape.size // 2**DOUBLINGS)
        self.size, self.first = shape.size, (8 * shape.width, side, side)
        self.start = NoiseWithLabel(shape.target, shape.latent)
        self.dense = nn.Linear(self.start.width, math.prod(self.first))
        nn.init.normal_(self.dense.weight, std=FIRST_SPREAD)
        widths = [8 * shape.width, 4 * shape.width, 2 * shape.width, shape.width, shape.channels]
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.LeakyReLU(SLOPE), nn.ConvTranspose2d(before, after, 5, 2, 2, 1)]
        self.body = nn.Sequential(*layers)

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        first = self.dense(self.start(noise, labels)).reshape(-1, *self.first)
        return torch.tanh(self.body(first)[..., : self.size, : self.size].float())


class PrivGANDiscriminator(nn.Module):
    """Images [B, C, H, W] in [-1, 1] and labels [B] to scores [B, outputs]: four convolutions, then a dense layer."""

    def __init__(self, shape: GANShape, condition: Condition, outputs: int) -> None:
        super().__init__()
        self.condition: Condition = "none" if condition == "apart" else condition
        side = -(-shape.size // 2**DOUBLINGS)
        self.whole = side * 2**DOUBLINGS
        self.missing = self.whole - shape.size
        widths = [shape.channels + (self.condition == "plane"), shape.width, 2 * shape.width, 2 * shape.width]
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise([*widths, 4 * shape.width]):
            layers += [nn.Conv2d(before, after, 5, 2, 2), nn.LeakyReLU(SLOPE)]
        nn.init.normal_(layers[0].weight, std=FIRST_SPREAD)  # type: ignore[arg-type]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(4 * shape.width * side**2, outputs)
        if self.condition != "none":
            self.label = LabelEmbedding(shape.target, self.whole**2 if condition == "plane" else 4 * shape.width)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        if self.missing:
            images = F.pad(images, (0, self.missing, 0, self.missing), mode="replicate")
        if self.condition == "plane":
            plane = self.label(labels).reshape(-1, 1, self.whole, self.whole)
            images = torch.cat([images, plane.to(images.dtype)], 1)
        features = self.body(images)
        scores = self.head(features.flatten(1))
        if self.condition == "projection":
            scores = scores + (features.mean((2, 3)) * self.label(labels)).sum(1, keepdim=True)
        return scores.float()
