"""The truth of a planted leak: held-out images take the place of training images, so that no private image is used."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import torch

from polyclinic.audits.views import Truth, rows_of
from polyclinic.data.parts import ImageSet, SiteData
from polyclinic.randomness import numpy_rng

FEWEST = 8  #: held-out images, half of which are planted


def truth_of_held_out(truth: Truth, count: int) -> Truth | None:
    """A site whose training images are up to `count`, and at most half, of this site's held-out images; None where
    there are too few."""
    together = join(truth.data.validation, truth.data.test)
    if len(together) < FEWEST:
        return None
    order = numpy_rng(truth.seed, truth.data.name, "audit", "planted").permutation(len(together))
    count = min(count, len(together) // 2)
    planted, rest = rows_of(together, order[:count]), rows_of(together, order[count:])
    data = SiteData(truth.data.name, planted, rest, rows_of(together, order[:0]))
    return Truth([torch.arange(count)], data, truth.seed)


def truth_of_asked(truth: Truth, count: int) -> Truth | None:
    """A site whose training images are every second one of the held-out images that an attack with so many candidates
    asks about; None where there are too few."""
    together = join(truth.data.validation, truth.data.test)
    chosen = truth.chosen_of_held_out(count)
    if len(chosen) < 2 * FEWEST:
        return None
    planted, rest = rows_of(together, chosen[::2]), rows_of(together, chosen[1::2])
    data = SiteData(truth.data.name, planted, rest, rows_of(together, chosen[:0]))
    return Truth([torch.arange(len(planted))], data, truth.seed)


def join(first: ImageSet, second: ImageSet) -> ImageSet:
    """The images of two parts, with all that the first has of each."""
    names = [one.name for one in fields(ImageSet) if getattr(first, one.name) is not None]
    return ImageSet(**{name: np.concatenate([getattr(first, name), getattr(second, name)]) for name in names})
