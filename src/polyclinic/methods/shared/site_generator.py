"""The study's generator at a site, and the study's tables about it, with their types."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from polyclinic.federation.site import Site
from polyclinic.generators import Generator, GeneratorModel
from polyclinic.generators.base import Progress
from polyclinic.generators.private_tuning import PrivateTuning
from polyclinic.progress import tell
from polyclinic.training import private


def build_generator(
    site: Site,
    state: Mapping[str, Tensor] | None = None,
    *,
    seed: int | None = None,
    with_masks: bool = False,
    shape: tuple[int, ...] | None = None,
) -> GeneratorModel:
    """The study's generator for the site's images, in a given state or with its first weights, the same at all sites
    unless `seed` is the site's own. `with_masks`: each image has its mask as one more channel. `shape` [C, H, W] is
    that of what it learns, where these are not the images.

    Where it is trained with differential privacy it computes in float32: rounded gradients have no bounded norm.
    """
    channels, *sides = shape or site.data.train.images.shape[1:]
    return generator_settings(site).build_for(
        (channels + with_masks, *sides),
        site.trainer.target,
        seed=site.seed if seed is None else seed,
        device=str(site.trainer.device),
        precision="fp32" if private.is_private(site, "generator") else site.trainer.precision,
        state=state,
    )


def generator_settings(site: Site) -> Generator:
    """The study's table [generator]."""
    assert isinstance(site.generator, Generator), "every study has one"
    return site.generator


def tuning_settings(site: Site) -> PrivateTuning | None:
    """The study's table [tuning], if its generator is trained in phases."""
    assert isinstance(site.tuning, PrivateTuning | None)
    return site.tuning


def generator_progress(site: Site) -> Progress:
    """Tells how far a generator at this site is."""
    return lambda stage, done, total, _: tell(f"{stage} of {site.name}", done, total)
