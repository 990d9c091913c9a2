"""DCGAN (Radford et al. 2015), conditional, in a form that learns from a few hundred images; and a Wasserstein GAN."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from polyclinic.generators.gan.losses import LossName
from polyclinic.generators.gan.networks import Architecture, DiscriminatorNorm
from polyclinic.generators.gan.settings import GAN


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
    architecture: ClassVar[Architecture] = "convolutions"


class WassersteinGAN(GAN):
    """The `[generator]` table with `name = "wgan-gp"` (Gulrajani et al. 2017)."""

    name: Literal["wgan-gp"] = "wgan-gp"
    loss: LossName = Field("linear", description="the measure phi: log, linear (Wasserstein) or hinge")
    penalty: float = Field(10.0, ge=0, description="weight of the gradient penalty")
    critic_steps: int = Field(5, ge=1, description="steps of the discriminator before each of the generator")
    norm: Literal["batch", "group"] = Field("batch", description="normalisation in the generator")

    summary: ClassVar[str] = "GAN of convolutions with a Wasserstein critic and gradient penalty"
    architecture: ClassVar[Architecture] = "convolutions"
