"""Generative adversarial networks: the settings all of them share, the model, and the first one (Goodfellow 2014).

`DCGAN` and `WassersteinGAN` are the same with other networks and another measure; methods with several owners
(FELICIA) take the model's networks and its `duel`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from polyclinic.data.pixels import to_uint8
from polyclinic.errors import BadInput
from polyclinic.federation.collaborators import Batch
from polyclinic.generators.base import Generator, GeneratorModel, Progress, as_tensor, initial_networks
from polyclinic.generators.gan.losses import Measure, Phi, phi_of
from polyclinic.generators.gan.networks import (
    Architecture,
    Condition,
    DiscriminatorNorm,
    Shape,
    discriminator_network,
    generator_network,
)
from polyclinic.generators.gan.trainer import Dice, Duel, Modules, judge_times
from polyclinic.generators.labels import check_labels
from polyclinic.generators.latent_space import GaussianSpace
from polyclinic.randomness import seed_of
from polyclinic.tasks import Target
from polyclinic.training.fitting import LearnPrivately, Schedule

CHUNK_PIXELS = 2**22  # made at a time
REPORTS = 20  # times that progress is told


class GAN(Generator):
    """What the `[generator]` tables of all GANs have in common."""

    steps: int = Field(3000, ge=1, description="steps of the generator in one fit")
    critic_steps: int = Field(1, ge=1, description="steps of the discriminator before each of the generator")
    lr: float = Field(2e-4, gt=0, description="learning rate of Adam (its first moment forgets half at each step)")
    lr_discriminator: float | None = Field(None, gt=0, description="the discriminator's, if it is to be another")
    loss: Measure = Field("log", description="the measure phi: log, linear (Wasserstein) or hinge")
    smoothing: float = Field(0.0, ge=0, lt=0.5, description="with loss 'log': what a real image's label lacks to 1")
    saturating: bool = Field(False, description="with loss 'log': lower log(1 - D), not -log D, as the formula has it")
    penalty: float = Field(0.0, ge=0, description="weight of the gradient penalty")
    condition: Condition = Field(
        "projection",
        description="how the discriminator learns the label: projection, plane (one more channel), apart (each class "
        "has networks of its own), or none: then images are made without regard to labels",
    )
    labels: Literal["real", "even"] = Field(
        "real", description="labels of made images in training: those of the real batch, or all classes alike"
    )
    balance: bool = Field(False, description="draw real batches with as many images of each class a site has")
    norm: Literal["batch", "group"] = Field("batch", description="normalisation in the generator")
    discriminator_norm: DiscriminatorNorm = Field("none", description="spectral, group or none")
    spread: bool = Field(
        False, description="tell the discriminator how much the images of a batch differ (convolutions only)"
    )
    augment: bool = Field(False, description="differentiable augmentation of what the discriminator sees")
    average: float = Field(0.999, ge=0, lt=1, description="samples come from this moving average of the generator")
    width: int = Field(24, ge=1, description="channels of the widest feature map; deeper ones have up to 8 times it")
    latent: int = Field(64, ge=1, description="random numbers that an image is made from")

    architecture: ClassVar[Architecture]

    @model_validator(mode="after")
    def _fits(self) -> GAN:
        if self.loss == "linear" and not self.penalty and self.discriminator_norm != "spectral":
            raise ValueError("loss 'linear' has no bound; set penalty = 10, or discriminator_norm = 'spectral'")
        return self

    def build(
        self, *, channels: int, size: int, target: Target, seed: int, device: str = "cpu", precision: str = "fp32"
    ) -> GANModel:
        return GANModel(
            self, channels=channels, size=size, target=target, seed=seed, device=device, precision=precision
        )

    def dp_obstacle(self) -> str | None:
        if self.discriminator_norm == "spectral":
            return (
                "generator.discriminator_norm: spectral norm divides weights by a number that moves at every step, "
                "outside clipping and noise; set generator.discriminator_norm = 'group' under differential privacy"
            )
        if self.condition == "apart":
            return (
                "generator.condition: each class's networks see a part of a batch, and clipping and noise are for "
                "whole ones; set generator.condition = 'projection' under differential privacy"
            )
        if self.penalty:
            return (
                "generator.penalty: the gradient penalty is a second derivative, which gradients per image cannot "
                "follow; set generator.penalty = 0 and generator.loss = 'hinge' under differential privacy"
            )
        if self.spread:
            return (
                "generator.spread: how much a batch differs mixes its images, so that one changes the gradients of "
                "all; set generator.spread = false under differential privacy"
            )
        if self.balance:
            return (
                "generator.balance: batches balanced by class are drawn by the labels, which no account knows of; "
                "set generator.balance = false under differential privacy"
            )
        if self.labels == "real":
            return (
                "generator.labels: labels of real images enter the generator without noise; "
                "set generator.labels = 'even' under differential privacy"
            )
        return None

    # --- what methods build from the settings -------------------------------------------------------

    @property
    def phi(self) -> Phi:
        return phi_of(self.loss, self.smoothing, self.saturating)

    def check_target(self, target: Target) -> None:
        if self.condition == "apart" and not target.classes:
            raise BadInput("generator.condition: 'apart' needs classes, and labels are values; choose 'projection'")

    def shape(self, channels: int, size: int, target: Target) -> Shape:
        """A GAN without condition knows no labels."""
        self.check_target(target)
        known = target if self.condition != "none" else Target()
        return Shape(channels, size, known, self.width, self.latent)

    def networks(self, shape: Shape) -> dict[str, nn.Module]:
        """Generator, its moving average, and discriminator; drawn from torch's global state."""
        made = generator_network(self.architecture, shape, self.condition, self.norm)
        judging = discriminator_network(
            self.architecture, shape, self.condition, self.discriminator_norm, spread=self.spread
        )
        return {"generator": made, "average": copy.deepcopy(made).requires_grad_(False), "discriminator": judging}

    def central(self, shape: Shape, owners: int) -> nn.Module:
        """A discriminator that tells owners apart: the same network, without labels, and with K outputs."""
        return discriminator_network(self.architecture, shape, "none", self.discriminator_norm, outputs=owners)

    def duel(self, networks: nn.ModuleDict, *, device: str | torch.device = "cpu", precision: str = "fp32") -> Duel:
        """The two networks, ready to learn from each other."""
        return Duel(Modules(networks), self.phi, device=device, precision=precision, **self.duel_settings())

    def duel_settings(self) -> dict:
        return {
            "latent": self.latent,
            "lr": self.lr,
            "lr_discriminator": self.lr_discriminator or self.lr,
            "penalty": self.penalty,
            "augmented": self.augment,
            "average": self.average,
            "separately": self.condition == "apart",
        }

    def wanted(self, labels: Tensor, target: Target, dice: Dice) -> Tensor:
        """Labels to make images for, where the real batch has these."""
        return labels if self.labels == "real" else drawn_labels(labels.shape[-1], target, dice)


class VanillaGAN(GAN):
    """The `[generator]` table with `name = "gan"`: dense layers and log."""

    name: Literal["gan"] = "gan"

    summary: ClassVar[str] = "the first GAN: two networks of dense layers"
    architecture: ClassVar[Architecture] = "dense"


class GANModel(GeneratorModel):
    """Networks `generator`, `average` (of the generator; samples come from it) and `discriminator`."""

    def __init__(
        self, settings: GAN, *, channels: int, size: int, target: Target, seed: int, device: str, precision: str
    ) -> None:
        shape = settings.shape(channels, size, target)
        made = initial_networks(lambda: settings.networks(shape), seed_of(seed, "generator"))
        super().__init__(made, channels=channels, size=size, target=target, device=device)
        self.settings, self.precision = settings, precision

    def fit(
        self,
        images: Tensor | np.ndarray,
        labels: Tensor | np.ndarray,
        rng: torch.Generator,
        *,
        replayed: Iterator[Batch] | None = None,
        progress: Progress | None = None,
        private: Mapping[str, LearnPrivately] | None = None,
    ) -> dict[str, float]:
        if private and "generator" in private:
            return self._fit_privately(images, labels, rng, private["generator"], replayed)
        dice = Dice(rng, self.device)
        batches = RealBatches(self, images, labels, rng, replayed)
        duel = self.duel()
        losses = []
        for step in range(1, self.settings.steps + 1):
            wanted = judge_times(duel, batches.next, self._wanted(dice), self.settings.critic_steps, dice)
            losses.append(duel.learn(duel.make(wanted, dice), wanted, dice))
            if progress is not None and step % max(1, self.settings.steps // REPORTS) == 0:
                progress("generator", step, self.settings.steps, float(torch.stack(losses[-100:]).mean()))
        return {"generator": float(torch.stack(losses[-100:]).mean())}

    def duel(self) -> Duel:
        return self.settings.duel(self.networks, device=self.device, precision=self.precision)

    def _wanted(self, dice: Dice):
        return lambda labels: self.settings.wanted(labels, self.target, dice)

    def _fit_privately(
        self,
        images: Tensor | np.ndarray,
        labels: Tensor | np.ndarray,
        rng: torch.Generator,
        learn: LearnPrivately,
        replayed: Iterator[Batch] | None,
    ) -> dict[str, float]:
        """The discriminator learns with differential privacy; the generator, which sees no image, through a copy of it.

        Before each private step on a batch the generator takes its own, so that both learn in turns as always.
        """
        settings, dice = self.settings, Dice(rng, self.device)
        batches = RealBatches(self, images, labels, rng, replayed)
        judging = self.networks["discriminator"]
        # private gradients hang on the modules of the discriminator: the generator's must not pass there
        twin = copy.deepcopy(judging)
        duel = settings.duel(nn.ModuleDict({**dict(self.networks.items()), "discriminator": twin}), device=self.device)

        def batch_of(index: Tensor) -> tuple[Tensor, ...]:
            twin.load_state_dict(judging.state_dict())
            wanted = drawn_labels(settings.batch_size, self.target, dice)
            duel.learn(duel.make(wanted, dice), wanted, dice)
            real, known = batches.at(index)
            with torch.no_grad():
                fake = duel.make(wanted, dice)
            rows = torch.cat([duel.look(real, dice), duel.look(fake, dice)])
            is_real = torch.arange(len(rows), device=self.device) < len(real)
            return rows, torch.cat([known, wanted.to(known.dtype)]), is_real

        losses = private_losses(judging, settings.phi)
        steps_in_pass = max(1, len(images) // settings.batch_size)
        passes = -(-settings.steps * settings.critic_steps // steps_in_pass)
        joined = settings.batch_size + (batches.joined if replayed else 0)
        learn(judging, losses, batch_of, Schedule(passes, settings.batch_size, settings.lr), joined)
        return {"generator": float("nan")}

    @torch.no_grad()
    def sample(self, labels: Tensor | np.ndarray, rng: torch.Generator) -> Tensor:
        labels = check_labels(as_tensor(labels), len(labels), self.target)
        net, dice = self.networks["average"].eval(), Dice(rng, self.device)
        made = []
        for some in labels.split(max(1, CHUNK_PIXELS // self.size**2)):
            noise = dice.normal(len(some), self.settings.latent)
            made.append(to_uint8((net(noise, self.on_device(some)) + 1) / 2))
        return torch.cat(made) if made else torch.empty(0, self.channels, self.size, self.size, dtype=torch.uint8)

    def latent_space(self) -> GaussianSpace:
        """The random numbers z that images are made from, given labels."""
        average = self.networks["average"].eval().requires_grad_(False)
        return GaussianSpace(lambda z, labels: (average(z, labels) + 1) / 2, self.settings.latent, labelled=True)

    def sampler_state(self) -> dict[str, Tensor]:
        """The part of `state()` that `sample` needs: no network in it has ever been given a real image."""
        return {name: tensor for name, tensor in self.state().items() if name.startswith("average.")}


def private_losses(judging: nn.Module, phi: Phi):
    """The discriminator's loss of each row, given images, labels and which of them are real."""

    def losses(rows: Tensor, known: Tensor, is_real: Tensor) -> Tensor:
        scores = judging(rows, known)[:, 0]
        return torch.where(is_real, phi.real(scores), phi.fake(scores))

    return losses


def drawn_labels(count: int, target: Target, dice: Dice) -> Tensor:
    """Labels drawn alike from the classes, or from the public range of values: they tell nothing about any image."""
    if target.classes:
        return dice.below(len(target.classes), count)
    low, high = target.label_range or (0.0, 0.0)
    return low + (high - low) * dice.uniform(count)


class RealBatches:
    """Shuffled mini-batches of real images in [-1, 1], each joined by replayed ones where there are any."""

    def __init__(
        self,
        model: GANModel,
        images: Tensor | np.ndarray,
        labels: Tensor | np.ndarray,
        rng: torch.Generator,
        replayed: Iterator[Batch] | None = None,
    ) -> None:
        self.model, self.replayed = model, replayed
        self.images = model.on_device(model.accept_images(images))
        self.labels = model.on_device(check_labels(as_tensor(labels), len(images), model.target))
        self._order = index_batches(self.labels.cpu(), model.settings, rng)
        self.joined = model.settings.batch_size

    def next(self) -> tuple[Tensor, Tensor]:
        return self.at(next(self._order))

    def at(self, index: Tensor) -> tuple[Tensor, Tensor]:
        index = self.model.on_device(index)
        real, labels = centred(self.images[index]), self.labels[index]
        if self.replayed is None:
            return real, labels
        more, known = next(self.replayed)
        joined = self.model.on_device(more) * 2 - 1
        return torch.cat([real, joined]), torch.cat([labels, self.model.on_device(known).to(labels.dtype)])


def centred(images: Tensor) -> Tensor:
    """uint8 images as float32 in [-1, 1]."""
    return images.float().div_(127.5).sub_(1)


def index_batches(labels: Tensor, settings: GAN, rng: torch.Generator) -> Iterator[Tensor]:
    """Indices of real images, batch after batch, as the settings want them drawn."""
    if settings.balance and not labels.is_floating_point():
        return balanced_batches(labels, settings.batch_size, rng)
    return endless_batches(len(labels), settings.batch_size, rng)


def balanced_batches(labels: Tensor, size: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Indices drawn with replacement: the classes that are there take turns, so each comes as often in a batch."""
    groups = [torch.nonzero(labels == one)[:, 0] for one in labels.unique()]
    turns = [groups[row % len(groups)] for row in range(size)]
    while True:
        draws = torch.rand(size, generator=rng)
        yield torch.stack([group[int(at * len(group))] for group, at in zip(turns, draws.tolist(), strict=True)])


def endless_batches(images: int, size: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Indices of one shuffled pass after another, in batches of exactly `size`, or of all images if those are fewer."""
    size = min(size, images)
    while True:
        order = torch.randperm(images, generator=rng, device=rng.device)
        yield from order[: images // size * size].split(size)
