"""Generators of several simulated sites that are trained as one stack, where they are GANs with batches of one size."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch

from polyclinic.federation.site import Site
from polyclinic.generators.base import GeneratorModel
from polyclinic.generators.gan.fit_together import Learner, fit_together
from polyclinic.generators.gan.model import GANModel
from polyclinic.generators.gan.settings import GAN
from polyclinic.methods.shared.site_generator import generator_progress, generator_settings, tuning_settings
from polyclinic.methods.shared.synthetic_buffer import new_generator, train_generator, training_images
from polyclinic.methods.shared.training_gans import batch_rows, stackable
from polyclinic.randomness import seeded
from polyclinic.training.gpu.stacking import stacking_gans_pays

#: a site's generator, and the figures of its training
Trained = tuple[GeneratorModel, dict[str, float]]


def train_generators(sites: Sequence[Site], keep: Callable[[Site, GeneratorModel], None]) -> list[Trained]:
    """What `train_generator` gives at each of several simulated sites, up to rounding; then `keep` what it made."""
    if not isinstance(generator_settings(sites[0]), GAN) or tuning_settings(sites[0]) is not None:
        return [_train_as_if_alone(site, keep) for site in sites]
    trained = _train_gans(sites)
    for site, (model, _) in zip(sites, trained, strict=True):
        keep(site, model)
    return trained


def _train_as_if_alone(site: Site, keep: Callable[[Site, GeneratorModel], None]) -> Trained:
    """A plug-in's generator may draw from torch's global state: each site has a stream of its own there."""
    with seeded(*site.address("prepare", site.round), gpus=range(torch.cuda.device_count())):
        model, figures = train_generator(site)
        keep(site, model)
    return model, figures


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
