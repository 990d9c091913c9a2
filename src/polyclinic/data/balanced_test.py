"""Test images with as many of each class: at every site, so that accuracy means the same everywhere (FedER, 4.1), or in
all (FELICIA, 5.3)."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from polyclinic.data.dataset import Dataset
from polyclinic.errors import BadInput
from polyclinic.randomness import numpy_rng

#: test images of each class at a site: a number, or as many as the site has of its rarest class
PerClass = Annotated[int, Field(ge=1)] | Literal["equal"]


def balanced(
    dataset: Dataset, where: dict[str, dict[str, np.ndarray]], per_class: PerClass, seed: int
) -> dict[str, dict[str, np.ndarray]]:
    """The images of each split of each site, their test images chosen so. Test images that are too many are left out of
    the study: their patients must not train."""
    _need_classes(dataset, "test_per_class")
    return {
        site: {**splits, "test": _chosen(dataset, splits["test"], site, per_class, seed)}
        for site, splits in where.items()
    }


def balanced_total(dataset: Dataset, index: np.ndarray, per_class: int, seed: int) -> np.ndarray:
    """`per_class` of the test images `index` for each class, before they are spread over sites."""
    _need_classes(dataset, "test_total_per_class")
    found = [index[dataset.labels[index] == number] for number in range(len(dataset.classes))]
    for name, own in zip(dataset.classes, found, strict=True):
        if len(own) < per_class:
            raise BadInput(
                f"data.test_total_per_class: there are {len(own)} test images of class '{name}', and {per_class} are "
                "wanted; raise data.test, or lower it"
            )
    rngs = [numpy_rng(seed, "balanced test", "all sites", number) for number in range(len(found))]
    return np.sort(np.concatenate([rng.permutation(own)[:per_class] for rng, own in zip(rngs, found, strict=True)]))


def _need_classes(dataset: Dataset, setting: str) -> None:
    if not dataset.classes:
        raise BadInput(f"data.{setting}: the labels are values and have no classes; leave it out")


def _chosen(dataset: Dataset, index: np.ndarray, site: str, per_class: PerClass, seed: int) -> np.ndarray:
    of_class = [index[dataset.labels[index] == number] for number in range(len(dataset.classes))]
    rarest = min(range(len(of_class)), key=lambda number: len(of_class[number]))
    wanted = max(1, len(of_class[rarest])) if per_class == "equal" else per_class
    if len(of_class[rarest]) < wanted:
        raise BadInput(
            f"data.test_per_class: site '{site}' has {len(of_class[rarest])} test images of class "
            f"'{dataset.classes[rarest]}', and {wanted} are wanted; raise data.test, or leave the setting out"
        )
    picked = [
        numpy_rng(seed, "balanced test", site, number).permutation(found)[:wanted]
        for number, found in enumerate(of_class)
    ]
    return np.sort(np.concatenate(picked))
