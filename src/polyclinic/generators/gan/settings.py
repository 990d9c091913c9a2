"""Settings of generative adversarial networks: what all GANs share, and the first one (Goodfellow et al. 2014).

`DCGAN` and `WassersteinGAN` are the same with other networks and another loss.
"""

import copy
import itertools
import math
from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from polyclinic.errors import BadInput
from polyclinic.generators.base import LabelEmbedding, ModelSpec, RandomSource
from polyclinic.generators.gan.adversarial import AdversarialGenerator, GANLoss, LossName, gan_loss
from polyclinic.generators.gan.model import GANModel
from polyclinic.generators.gan.networks import (
    SLOPE,
    Condition,
    ConvDiscriminator,
    ConvGenerator,
    DenseDiscriminator,
    DenseGenerator,
    DiscriminatorNorm,
    GANShape,
    ImageDiscriminator,
    NoiseWithLabel,
    for_each_class,
)
from polyclinic.generators.gan.trainer import adam, random_labels
from polyclinic.tasks import Target

CONDITION = (
    "how the discriminator learns the label: projection, plane (one more channel), apart (each class has networks of "
    "its own), or none: then images are made without regard to labels"
)
APART_NEEDS_CLASSES = "generator.condition: 'apart' needs classes, and labels are values; choose 'projection'"


#: of a dense discriminator with group norm: 8 x 2 features in 16 groups would be one feature a group
NARROWEST_GROUPED = 3
#: over a site's images, where a study does not say how many steps
PASSES = 30


class GAN(AdversarialGenerator):
    """What the `[generator]` tables of all GANs have in common."""

    tunable: ClassVar[bool] = True
    stackable: ClassVar[bool] = True

    steps: int | None = Field(
        None, ge=1, description=f"steps of the generator in one fit; {PASSES} passes over a site's images if not given"
    )
    critic_steps: int = Field(1, ge=1, description="steps of the discriminator before each of the generator")
    lr: float = Field(2e-4, gt=0, description="learning rate of Adam (its first moment forgets half at each step)")
    lr_discriminator: float | None = Field(None, gt=0, description="the discriminator's, if it is to be another")
    loss: LossName = Field("log", description="the measure phi: log, linear (Wasserstein) or hinge")
    smoothing: float = Field(0.0, ge=0, lt=0.5, description="with loss 'log': what a real image's label lacks to 1")
    saturating: bool = Field(False, description="with loss 'log': lower log(1 - D), not -log D, as the formula has it")
    penalty: float = Field(0.0, ge=0, description="weight of the gradient penalty")
    condition: Condition = Field("projection", description=CONDITION)
    labels: Literal["real", "even"] = Field(
        "real", description="labels of made images in training: those of the real batch, or all classes alike"
    )
    balance: bool = Field(False, description="draw real batches with as many images of each class a site has")
    norm: Literal["batch", "group"] = Field("batch", description="normalisation in the generator")
    discriminator_norm: DiscriminatorNorm = Field("none", description="spectral, group or none")
    spread: bool = Field(False, description="tell the discriminator how far a batch's images differ (for convolutions)")
    augment: bool = Field(False, description="differentiable augmentation of what the discriminator sees")
    average: float = Field(0.999, ge=0, lt=1, description="samples come from this moving average of the generator")
    width: int = Field(24, ge=1, description="channels of the widest feature map; deeper ones have up to 8 times it")
    latent: int = Field(64, ge=1, description="random numbers that an image is made from")

    def steps_on(self, images: int) -> int:
        return self.steps or PASSES * max(1, images // self.batch_size)

    @model_validator(mode="after")
    def _fits(self) -> "GAN":
        if self.loss == "linear" and not self.penalty and self.discriminator_norm != "spectral":
            raise ValueError("loss 'linear' has no bound; set penalty = 10, or discriminator_norm = 'spectral'")
        return self

    def model_for(self, spec: ModelSpec) -> GANModel:
        return GANModel(self, spec)

    def dp_obstacle(self) -> str | None:
        found = {
            "discriminator_norm: spectral norm divides weights by a number that moves at every step, outside clipping "
            "and noise; set generator.discriminator_norm = 'group'": self.discriminator_norm == "spectral",
            "condition: each class's networks see a part of a batch, and clipping and noise are for whole ones; set "
            "generator.condition = 'projection'": self.condition == "apart",
            "penalty: the gradient penalty is a second derivative, which gradients per image cannot follow; set "
            "generator.penalty = 0 and generator.loss = 'hinge'": bool(self.penalty),
            "spread: how much a batch differs mixes its images, so that one changes the gradients of all; set "
            "generator.spread = false": self.spread,
            "balance: batches balanced by class are drawn by the labels, which no account knows of; set "
            "generator.balance = false": self.balance,
            "labels: labels of real images enter the generator without noise; set generator.labels = 'even'": (
                self.labels == "real"
            ),
        }
        reason = next((reason for reason, holds in found.items() if holds), None)
        return reason and f"generator.{reason} under differential privacy"

    # --- what methods build from the settings -------------------------------------------------------

    @property
    def gan_loss(self) -> GANLoss:
        return gan_loss(self.loss, self.smoothing, self.saturating)

    @property
    def separates_classes(self) -> bool:
        return self.condition == "apart"

    @property
    def ignores_labels(self) -> bool:
        return self.condition == "none"

    @property
    def balances_classes(self) -> bool:
        return self.balance

    @property
    def takes_turns(self) -> bool:
        return self.balance and self.labels == "real"

    def check_images(self, size: int, task: str) -> None:
        if self.separates_classes and task != "classification":
            raise BadInput(APART_NEEDS_CLASSES)

    def shape(self, channels: int, size: int, target: Target) -> GANShape:
        """A GAN without condition knows no labels."""
        if self.separates_classes and not target.classes:
            raise BadInput(APART_NEEDS_CLASSES)
        known = target if self.condition != "none" else Target()
        return GANShape(channels, size, known, self.width, self.latent)

    def networks(self, shape: GANShape) -> dict[str, nn.Module]:
        """Generator, its EMA (average), and discriminator; drawn from torch's global state."""
        apart = self.condition == "apart"
        generator = for_each_class(shape, apart, self.generator_network)
        condition: Condition = "none" if apart else self.condition
        discriminator = for_each_class(shape, apart, lambda one: self.discriminator_network(one, condition))
        average = copy.deepcopy(generator).requires_grad_(False)
        return {"generator": generator, "average": average, "discriminator": discriminator}

    def generator_network(self, shape: GANShape) -> nn.Module:
        return ConvGenerator(shape, self.norm)

    def discriminator_network(self, shape: GANShape, condition: Condition, sites: int | None = None) -> nn.Module:
        """With `sites` it names one of them, has no spread, and is otherwise the same network."""
        spread = self.spread and sites is None
        return ConvDiscriminator(shape, condition, self.discriminator_norm, sites or 1, spread)

    def central_discriminator(
        self, *, channels: int, size: int, target: Target, sites: int, per_class: bool = False
    ) -> nn.Module:
        shape = self.shape(channels, size, target)
        return for_each_class(shape, per_class, lambda one: self.discriminator_network(one, "none", sites))

    def central_optimizer(
        self, parameters: Iterable[nn.Parameter], lr: float | None, *, capturable: bool
    ) -> torch.optim.Optimizer:
        return adam(list(parameters), lr or self.lr_discriminator or self.lr, capturable=capturable)

    def labels_to_make(self, labels: Tensor, target: Target, random: RandomSource) -> Tensor:
        """Labels to make images for, where the real batch has these."""
        return labels if self.labels == "real" else random_labels(labels.shape[-1], target, random)


class VanillaGAN(GAN):
    """The `[generator]` table with `name = "gan"`: dense layers and log."""

    name: Literal["gan"] = "gan"

    summary: ClassVar[str] = "the first GAN: two networks of dense layers"

    @model_validator(mode="after")
    def _has_groups(self) -> "VanillaGAN":
        if self.discriminator_norm == "group" and self.width < NARROWEST_GROUPED:
            raise ValueError(
                f"width {self.width} makes groups of one feature, whose group norm is 0 whatever the image shows; set "
                f"width = {NARROWEST_GROUPED} or more, or discriminator_norm = 'none'"
            )
        return self

    def generator_network(self, shape: GANShape) -> nn.Module:
        return DenseGenerator(shape)

    def discriminator_network(self, shape: GANShape, condition: Condition, sites: int | None = None) -> nn.Module:
        return DenseDiscriminator(shape, condition, self.discriminator_norm, sites or 1)


class DCGAN(GAN):
    """The `[generator]` table with `name = "dcgan"`.

    Hinge loss, spectral norm and differentiable augmentation are what lets it learn small data; `loss = "log"`,
    `discriminator_norm = "none"`, `augment = false` is nearer to Radford et al.'s.
    """

    name: Literal["dcgan"] = "dcgan"
    lr: float = Field(5e-4, gt=0, description="learning rate of Adam (its first moment forgets half at each step)")
    loss: LossName = Field("hinge", description="the measure phi: log, linear (Wasserstein) or hinge")
    discriminator_norm: DiscriminatorNorm = Field("spectral", description="spectral, group or none")
    spread: bool = Field(True, description="tell the discriminator how much the images of a batch differ")
    augment: bool = Field(True, description="differentiable augmentation of what the discriminator sees")

    summary: ClassVar[str] = "GAN of convolutions, conditional; the quick one"


class WassersteinGAN(GAN):
    """The `[generator]` table with `name = "wgan-gp"` (Gulrajani et al. 2017)."""

    name: Literal["wgan-gp"] = "wgan-gp"
    loss: LossName = Field("linear", description="the measure phi: log, linear (Wasserstein) or hinge")
    penalty: float = Field(10.0, ge=0, description="weight of the gradient penalty")
    critic_steps: int = Field(5, ge=1, description="steps of the discriminator before each of the generator")

    summary: ClassVar[str] = "GAN of convolutions with a Wasserstein critic and gradient penalty"


# --- PrivGAN --------------------------------------------------------------------------------------
# FELICIA's paper gives no layers of its GANs; it starts from PrivGAN's public code (Mukherjee et al. 2021), there for
# CIFAR-10. Kernels have 5x5 pixels, activations are leaky, and there is no normalisation.


DOUBLINGS = 4
FIRST_SPREAD = 0.02  # standard deviation of the first layer's weights


class PrivGAN(GAN):
    """The `[generator]` table with `name = "privgan"`."""

    name: Literal["privgan"] = "privgan"
    smoothing: float = Field(0.05, ge=0, lt=0.5, description="with loss 'log': what a real image's label lacks to 1")
    condition: Condition = Field("apart", description=CONDITION)
    balance: bool = Field(True, description="draw real batches with as many images of each class a site has")
    average: float = Field(0.0, ge=0, lt=1, description="samples come from this moving average of the generator")
    width: int = Field(64, ge=1, description="channels of the widest feature map; deeper ones have up to 8 times it")
    latent: int = Field(100, ge=1, description="random numbers that an image is made from")

    summary: ClassVar[str] = "the convolutional GAN of PrivGAN's code: 5x5 kernels, no normalisation"

    @model_validator(mode="after")
    def _has_no_norms(self) -> "PrivGAN":
        if self.discriminator_norm != "none" or self.spread:
            raise ValueError("privgan has no norms and no spread; set discriminator_norm = 'none', spread = false")
        return self

    def generator_network(self, shape: GANShape) -> nn.Module:
        return PrivGANGenerator(shape)

    def discriminator_network(self, shape: GANShape, condition: Condition, sites: int | None = None) -> nn.Module:
        return PrivGANDiscriminator(shape, condition, sites or 1)


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


class PrivGANDiscriminator(ImageDiscriminator):
    """Four convolutions, then a dense layer."""

    def __init__(self, shape: GANShape, condition: Condition, outputs: int) -> None:
        super().__init__()
        self.condition, self.spread = condition, nn.Identity()
        side = -(-shape.size // 2**DOUBLINGS)
        self.whole = side * 2**DOUBLINGS
        widths = [shape.channels + (self.condition == "plane"), shape.width, 2 * shape.width, 2 * shape.width]
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise([*widths, 4 * shape.width]):
            layers += [nn.Conv2d(before, after, 5, 2, 2), nn.LeakyReLU(SLOPE)]
        nn.init.normal_(layers[0].weight, std=FIRST_SPREAD)  # type: ignore[arg-type]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(4 * shape.width * side**2, outputs)
        if self.condition != "none":
            self.label = LabelEmbedding(shape.target, self.whole**2 if condition == "plane" else 4 * shape.width)
