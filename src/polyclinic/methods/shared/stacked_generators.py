"""Generators of several simulated sites that are trained as one stack, where they are GANs with batches of one size."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch

from polyclinic.federation.site import Site
from polyclinic.generators.base import GeneratorModel
from polyclinic.generators.gan.model import GANModel
from polyclinic.generators.gan.settings import GAN
from polyclinic.generators.gan.stack import Learner, fit_together
from polyclinic.methods.shared.site_generator import generator_progress, generator_settings, tuning_settings
from polyclinic.methods.shared.synthetic_buffer import new_generator, train_generator, training_images
from polyclinic.methods.shared.training_gans import batch_rows, stackable
from polyclinic.randomness import seeded
from polyclinic.training.gpu.stacking import has_dropout, stacking_gans_pays

if TYPE_CHECKING:
    from polyclinic.federation.collaborators import TrainerLike

#: a site's generator, and the figures of its training
Trained = tuple[GeneratorModel, dict[str, float]]


@dataclass(frozen=True)
class FitGenerator:
    """Train the site's generator on its images and `keep` what comes of it; the figures of its training.

    `reuse`: it is kept in the cache, or taken from there.
    """

    site: Site
    keep: Callable[[GeneratorModel], None]
    reuse: bool

    divides: ClassVar[bool] = True

    @classmethod
    def may_group(cls, method: Any, trainer: TrainerLike, sites: int, *, noted: bool) -> bool:
        # generators of the cache are taken one by one; dropout draws from torch's global state
        return not (noted or trainer.stacked == "never" or method.reuse_generators or has_dropout(trainer.model))

    @classmethod
    def carry_out(cls, plans: Sequence[Self]) -> list[dict[str, float]]:
        if len(plans) == 1:  # it goes on with the stream of its operation, as its network's dropout does after it
            return [plans[0].alone()]
        settings, tuning = generator_settings(plans[0].site), tuning_settings(plans[0].site)
        if not isinstance(settings, GAN) or tuning is not None:
            return [plan.as_if_alone() for plan in plans]
        trained = _train_gans([plan.site for plan in plans])
        for plan, (model, _) in zip(plans, trained, strict=True):
            plan.keep(model)
        return [figures for _, figures in trained]

    def alone(self) -> dict[str, float]:
        model, figures = train_generator(self.site, reuse=self.reuse)
        self.keep(model)
        return figures

    def as_if_alone(self) -> dict[str, float]:
        """A plug-in's generator may draw from torch's global state: each site has a stream of its own there."""
        with seeded(*self.site.address("prepare", self.site.round), gpus=range(torch.cuda.device_count())):
            return self.alone()


def _train_gans(sites: Sequence[Site]) -> list[Trained]:
    found: dict[str, Trained] = {}
    ordered = sorted(sites, key=batch_rows)
    for _, alike in itertools.groupby(ordered, key=batch_rows):
        for group in stackable(list(alike)):
            found |= {site.name: one for site, one in zip(group, _train_group(group), strict=True)}
    return [found[site.name] for site in sites]


def _train_group(sites: Sequence[Site]) -> list[Trained]:
    side = sites[0].data.train.images.shape[-1]
    pays = sites[0].trainer.stacked == "always" or stacking_gans_pays(len(sites), side)
    if len(sites) > 1 and pays:
        try:
            return _train_stack(sites)
        except RuntimeError as error:  # no memory, or no kernel
            words = "engine.stacked: generators are trained one after the other, more slowly"
            warnings.warn(f"{words}: {error}", stacklevel=4)
    return [train_generator(site) for site in sites]


def _train_stack(sites: Sequence[Site]) -> list[Trained]:
    models = [new_generator(site) for site in sites]
    figures = fit_together([_learner(site, model) for site, model in zip(sites, models, strict=True)])
    return [(model, {f"loss_{name}": v for name, v in own.items()}) for model, own in zip(models, figures, strict=True)]


def _learner(site: Site, model: GeneratorModel) -> Learner:
    assert isinstance(model, GANModel), "the settings of a GAN build one"
    labels = np.asarray(site.data.train.labels)
    return Learner(model, training_images(site), labels, site.rng("generator"), generator_progress(site))
