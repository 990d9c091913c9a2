"""Whom differential privacy protects at a site, and which of them a step takes: images, or patients with all images."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from polyclinic.errors import BadInput
from polyclinic.privacy.dp_sgd import poisson
from polyclinic.randomness import numpy_rng
from polyclinic.training.image_draws import Address, image_names

if TYPE_CHECKING:
    from polyclinic.data.parts import ImageSet
    from polyclinic.federation.site import Site

#: steps that are drawn ahead for each image or patient
AHEAD = 16
#: what a site's cache keeps them under
CACHED = "private units"


@dataclass(frozen=True)
class Units:
    """`names` are the images or the patients by what their images hold, whoever else is there. `image_names` are those
    of the images; `patients` int64 [N] says whose each image is, and is None where images are the unit."""

    names: list[str]
    image_names: list[str]
    patients: Tensor | None = None

    def __len__(self) -> int:
        return len(self.names)

    def draw(self, sampling_rate: float, address: Address, *, by_name: bool) -> Iterator[Tensor]:
        """Endless batches of indices of images, int64 [B]: each unit takes part with the same chance, B may be 0.

        By name, a unit's draws are its own; else they go by its place, and one unit less would change the others'.
        """
        by_place = poisson(len(self), sampling_rate, numpy_rng(*address, "images"))
        for chosen in by_names(self.names, sampling_rate, address) if by_name else by_place:
            yield chosen if self.patients is None else torch.isin(self.patients, chosen).nonzero().flatten()


def by_names(names: Sequence[str], sampling_rate: float, address: Address) -> Iterator[Tensor]:
    """Numbers of units, from a stream of random numbers for each of them."""
    streams = [numpy_rng(*address, "takes part", name) for name in names]
    while True:
        drawn = np.stack([rng.random(AHEAD) for rng in streams]) if streams else np.empty((0, AHEAD))
        for step in range(AHEAD):
            yield torch.from_numpy(np.flatnonzero(drawn[:, step] < sampling_rate))


def units_of(site: Site, unit: str) -> Units:
    """The units of a site's training images; BadInput where patients are to be protected and nobody knows them."""
    key = f"{CACHED} {unit}"
    if key not in site.cache:
        site.cache[key] = find_units(site.data.train, unit, site.name)
    return site.cache[key]


def find_units(images: ImageSet, unit: str, site: str) -> Units:
    """The units of some images of a site."""
    known = image_names(images)
    if unit == "image":
        return Units(once_each(known), known)
    if images.cases is None:
        raise BadInput(
            f"privacy.unit: nobody knows which images of site '{site}' are of one patient; name patients in its data, "
            "or set privacy.unit = 'image'"
        )
    found, patients = np.unique(images.cases, return_inverse=True)
    own: list[list[str]] = [[] for _ in found]
    for name, patient in zip(known, patients.tolist(), strict=True):
        own[patient].append(name)
    names = [hashlib.sha256(" ".join(sorted(one)).encode()).hexdigest() for one in own]
    return Units(once_each(names), known, torch.from_numpy(patients.astype(np.int64)))


def once_each(names: Sequence[str]) -> list[str]:
    """The names, those that come again with a number: two equal images must not always take part together."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name} {seen[name]}")
    return found
