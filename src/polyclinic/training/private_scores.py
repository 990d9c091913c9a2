"""Scores that leave a site whose study trains with differential privacy: as they are, or with noise of their own.

Noised scores are entered in the account of the training steps, as if they were of the same images. Validation and test
images take part in no step, so that this counts too much rather than too little.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from polyclinic.json_types import JsonObject
from polyclinic.privacy.account import HELD_OUT, SCORED_COUNTS
from polyclinic.training import private

if TYPE_CHECKING:
    from polyclinic.data.parts import ImageSet
    from polyclinic.federation.site import Site


def noise_of(site: Site) -> float | None:
    """The noise that the study wants on scores; None where they leave as they are."""
    return site.trainer.privacy.score_noise if site.trainer.privacy is not None else None


def scored_images(site: Site, split: str) -> ImageSet:
    """The images of a split that are scored: all; or the first one of each patient, where noise must hide a patient."""
    part: ImageSet = getattr(site.data, split)
    privacy = site.trainer.privacy
    if privacy is None or noise_of(site) is None or privacy.unit == "image" or part.cases is None:
        return part
    rows = np.sort(np.unique(part.cases, return_index=True)[1])
    arrays = {one.name: getattr(part, one.name) for one in fields(part)}
    return replace(part, **{name: array[rows] for name, array in arrays.items() if isinstance(array, np.ndarray)})


def release(site: Site, sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sums of scores as they leave: as they are, or with noise; none if the budget does not allow them any more."""
    noise, trainer = noise_of(site), site.trainer
    if noise is None:
        return sums
    from polyclinic.privacy import dp_sgd

    address = private.enter_release(site, noise)
    if address is None:
        return {}
    draw = dp_sgd.noise_from(torch.device("cpu"), *address, "scores")
    return trainer.task.noised(sums, lambda like: noise * draw(like), trainer.target)


def record_of(site: Site, split: str) -> JsonObject | None:
    """The record of scores; None for exact scores of training images, or of a model without privacy.

    A private model's scores on other images tell no more about its training images than the model does.
    """
    if noise_of(site) is not None:
        return private.record_for(site, ["noised scores"], [SCORED_COUNTS])
    if split == "train" or not private.is_private(site, "classifier"):
        return None
    return private.record_for(site, ["scores on validation and test images"], [HELD_OUT])
