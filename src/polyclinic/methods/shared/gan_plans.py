"""GANs in training at sites: what a method asks of them, what a site's state keeps of them, which can be stacked."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from polyclinic.federation.collaborators import TrainerLike
from polyclinic.federation.federation import Federation
from polyclinic.federation.site import Site
from polyclinic.generators.base import RandomSource, as_tensor
from polyclinic.generators.gan.adversarial import AdversarialGenerator, AdversarialModel
from polyclinic.randomness import torch_rng
from polyclinic.training import private
from polyclinic.training.optimizer import optimizer_tensors, restore_optimizer

#: groups of a site's state
NETWORKS, GENERATOR_ADAM, DISCRIMINATOR_ADAM = "gan", "gan-generator-adam", "gan-discriminator-adam"
STEPS = "gan-steps"

#: fake images [..., B, C, H, W], their labels [..., B], and random numbers, to the gradient of a further loss w.r.t.
#: those images
ImageGradient = Callable[[Tensor, Tensor, Tensor], Tensor]


class SyntheticBatch(NamedTuple):
    """Images in [-1, 1] that a generator made, without gradients, and the labels that it made them for."""

    images: Tensor  #: [B, C, H, W]
    labels: Tensor  #: [B]


class TrainingGANs(ABC):
    """GANs of sites in training, for one round; `keep` puts what was learnt into the sites' states."""

    names: list[str]  #: the sites, in the order of what `start` and `advance` give
    rows: int  #: images of a site that a step makes

    @abstractmethod
    def start(self) -> list[SyntheticBatch]:
        """The discriminators' steps; then every site's next images."""

    @abstractmethod
    def generator_step(self, gradients: Mapping[str, Tensor]) -> None:
        """The generators' steps for the images that were made last, with the gradients of a further loss w.r.t. those
        images, by site, if there are any."""

    def advance(self, gradients: Mapping[str, Tensor]) -> list[SyntheticBatch]:
        """The generators' steps, the discriminators' steps, and the next images."""
        self.generator_step(gradients)
        return self.start()

    @abstractmethod
    def local_step(self, image_gradient: ImageGradient | None = None, draws: Tensor | None = None) -> None:
        """The discriminators' steps, then one of the generators, with the gradient of a further loss w.r.t. the fake
        images; `draws` are what `image_gradient` needs besides them."""

    @abstractmethod
    def sample(self, count: int) -> list[SyntheticBatch]:
        """`count` images of every site."""

    @abstractmethod
    def keep(self) -> None:
        """Put networks and optimisers into the sites' states."""


#: the GANs of some sites, ready for the steps of a round
MakeGANs = Callable[["Sequence[Site]"], TrainingGANs]


@dataclass(frozen=True)
class _GANPlan:
    """Work of a site's GAN. A stack lives for a round, over many asks: all its sites must be asked at once."""

    site: Site

    divides: ClassVar[bool] = False

    @classmethod
    def may_group(cls, method: Any, trainer: TrainerLike, sites: int, *, noted: bool) -> bool:
        return True


@dataclass(frozen=True)
class TrainGAN(_GANPlan):
    """Take `steps(gans, sites)` and keep what was learnt; then `sampled` images of the site, or none."""

    gans: MakeGANs
    steps: Callable[[TrainingGANs, Sequence[Site]], None]
    sampled: int = 0

    @classmethod
    def carry_out(cls, plans: Sequence[Self]) -> list[SyntheticBatch | None]:
        made: list[SyntheticBatch | None] = []
        for group in stackable([plan.site for plan in plans]):
            gans = plans[len(made)].gans(group)
            plans[len(made)].steps(gans, group)
            gans.keep()
            made += gans.sample(plans[0].sampled) if plans[0].sampled else [None] * len(group)
        return made


@dataclass(frozen=True)
class StartGAN(_GANPlan):
    """The discriminator's first step of a round, and the first images. The site's memory has the GANs until the end."""

    gans: MakeGANs

    @classmethod
    def carry_out(cls, plans: Sequence[Self]) -> list[SyntheticBatch]:
        made: list[SyntheticBatch] = []
        for group in stackable([plan.site for plan in plans]):
            gans = plans[len(made)].gans(group)
            for site in group:
                site.memory["gans"] = gans
            made += gans.start()
        return made


@dataclass(frozen=True)
class AdvanceGAN(_GANPlan):
    """The generator's step for the images that were made last, with the gradient that came for them; then the
    discriminator's step and the next images, unless it was the `last` of the round."""

    gradient: Tensor | None
    last: bool

    @classmethod
    def carry_out(cls, plans: Sequence[Self]) -> list[SyntheticBatch | None]:
        by_site = {plan.site.name: plan.gradient for plan in plans if plan.gradient is not None}
        made: dict[str, SyntheticBatch] = {}
        for _, group in itertools.groupby([plan.site for plan in plans], key=lambda site: id(site.memory["gans"])):
            sites = list(group)
            gans: TrainingGANs = sites[0].memory["gans"]
            own = {site.name: by_site[site.name] for site in sites if site.name in by_site}
            if plans[0].last:
                gans.generator_step(own)
                gans.keep()
                for site in sites:
                    site.memory.clear()
            else:
                made |= zip(gans.names, gans.advance(own), strict=True)
        return [made.get(plan.site.name) for plan in plans]


def stackable(sites: Sequence[Site]) -> list[list[Site]]:
    """Sites in groups whose GANs can be stacked: all of them, or each one alone."""
    alone, settings = [[site] for site in sites], adversarial_settings(sites[0])
    if len(sites) < 2 or not settings.stackable or any(private.is_private(s, "generator") for s in sites):
        return alone
    shapes = {(site.data.train.images.shape[1:], batch_rows(site), steps_taken(site)) for site in sites}
    fits = not settings.separates_classes or classes_take_turns(sites)
    return [list(sites)] if len(shapes) == 1 and fits else alone


def batch_rows(site: Site) -> int:
    """Real images in a batch: all that a small site has, unless batches are balanced, which repeats images."""
    settings = adversarial_settings(site)
    balanced = settings.balances_classes and bool(site.trainer.target.classes)
    return settings.batch_size if balanced else min(settings.batch_size, len(site.data.train))


def classes_take_turns(sites: Sequence[Site]) -> bool:
    """True where every batch of every site holds all classes in turns (0, 1, 0, 1, ...), each equally often."""
    settings, classes = adversarial_settings(sites[0]), len(sites[0].trainer.target.classes)
    if not settings.takes_turns or not classes or settings.batch_size % classes:
        return False
    return all(len(np.unique(site.data.train.labels)) == classes for site in sites)


def steps_taken(site: Site) -> int:
    return int(site.state[STEPS]) if STEPS in site.state else 0


def adversarial_settings(at: Federation | Site) -> AdversarialGenerator:
    """The study's table [generator], at the coordinator or at a site."""
    assert isinstance(at.generator, AdversarialGenerator), "the study's checks refuse any other"
    return at.generator


# --- a GAN of any kind, in two halves of a step -------------------------------------------------------

COUNTERS = "gan-"  # begins the names of `AdversarialSteps.counters` in a site's state


class SiteGANInHalves(TrainingGANs):
    """The GAN of one site."""

    def __init__(self, site: Site, model: AdversarialModel, *, shared_noise: bool, purpose: str) -> None:
        self.site, self.model, self.names, self.rows = site, model, [site.name], batch_rows(site)
        images = model.accept_images(np.asarray(site.data.train.images))
        labels = as_tensor(np.asarray(site.data.train.labels))
        self.steps = model.begin_halves(images, labels, site.rng(purpose))
        self.noise = self.steps.random
        if shared_noise:  # PrivGAN's code: in every step all generators get the same noise
            self.noise = RandomSource(torch_rng(site.seed, "noise", purpose, site.round), model.device)
        restore_optimizer(self.steps.of_generator, site.state.group(GENERATOR_ADAM))
        restore_optimizer(self.steps.of_discriminator, site.state.group(DISCRIMINATOR_ADAM))
        self.steps.taken = steps_taken(site)
        kept = {name: COUNTERS + name for name in self.steps.counters()}
        self.steps.restore_counters({name: site.state[key] for name, key in kept.items() if key in site.state})
        self.labels = self.fake = torch.empty(0)  # of the images that were made last

    def start(self) -> list[SyntheticBatch]:
        self._discriminate_and_make()
        return [SyntheticBatch(self._cropped(self.fake).detach(), self.labels)]

    def generator_step(self, gradients: Mapping[str, Tensor]) -> None:
        self._generator_step(gradients.get(self.site.name))

    def local_step(self, image_gradient: ImageGradient | None = None, draws: Tensor | None = None) -> None:
        self._discriminate_and_make()
        images = self._cropped(self.fake)
        gradient = None if image_gradient is None else image_gradient(images, self.labels, draws)  # type: ignore[arg-type]
        self._generator_step(gradient)

    @torch.no_grad()
    def sample(self, count: int) -> list[SyntheticBatch]:
        images: list[Tensor] = []
        labels: list[Tensor] = []
        while sum(len(some) for some in labels) < count:
            labels.append(next(self.steps.batches)[1])
            images.append(self._cropped(self.steps.make(labels[-1], self.noise)))
        return [SyntheticBatch(torch.cat(images)[:count], torch.cat(labels)[:count])]

    def keep(self) -> None:
        state = self.site.state
        state.put(NETWORKS, self.model.state())
        state.put(GENERATOR_ADAM, optimizer_tensors(self.steps.of_generator))
        state.put(DISCRIMINATOR_ADAM, optimizer_tensors(self.steps.of_discriminator))
        state[STEPS] = torch.tensor(self.steps.taken)
        for name, value in self.steps.counters().items():
            state[COUNTERS + name] = value

    # --- inside -------------------------------------------------------------------------------------

    def _discriminate_and_make(self) -> None:
        self.labels = self.steps.discriminator_half()
        self.fake = self.steps.make(self.labels, self.noise)

    def _generator_step(self, gradient: Tensor | None) -> None:
        """`gradient` is of the images as they left: at the border that was cut off, it is zero."""
        missing = self.fake.shape[-1] - self.model.size
        if gradient is not None:
            gradient = F.pad(gradient.to(self.model.device).float(), (0, missing, 0, missing))
        self.steps.generator_half(self.fake, self.labels, gradient)
        self.fake = torch.empty(0)

    def _cropped(self, images: Tensor) -> Tensor:
        return images[..., : self.model.size, : self.model.size]
