"""Functions that assign indices to sites, shared by the partitions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def cuts(shares: np.ndarray, total: int) -> np.ndarray:
    """Where to cut `total` images into parts of the given shares (they sum to 1): int64 [len(shares) - 1]."""
    return np.rint(np.cumsum(shares)[:-1] * total).astype(np.int64)


def slices(names: Sequence[str], ordered: np.ndarray, shares: np.ndarray) -> dict[str, np.ndarray]:
    """Consecutive parts of `ordered` in the given shares, one per name, each sorted."""
    parts = np.split(ordered, cuts(shares, len(ordered)))
    return {name: np.sort(part) for name, part in zip(names, parts, strict=True)}


def equal_slices(names: Sequence[str], ordered: np.ndarray) -> dict[str, np.ndarray]:
    """Consecutive parts of `ordered`, equally large but for one image, one per name, each sorted."""
    parts = np.array_split(ordered, len(names))
    return {name: np.sort(part) for name, part in zip(names, parts, strict=True)}


def deal_patients(
    names: Sequence[str], index: np.ndarray, patient: np.ndarray, shares: np.ndarray, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Whole patients to each site, at random, so that its share of the images is as near as patients allow.

    `patient` [len(index)] names each image's patient. Patients with most images go first, each to the site
    that lacks most.
    """
    _, which, sizes = np.unique(patient, return_inverse=True, return_counts=True)
    order = rng.permutation(len(sizes))
    order = order[np.argsort(-sizes[order], kind="stable")]
    lacking = shares * len(index)
    site_of = np.empty(len(sizes), dtype=np.int64)
    for who in order:
        site_of[who] = np.argmax(lacking)
        lacking[site_of[who]] -= sizes[who]
    return {name: np.sort(index[site_of[which] == k]) for k, name in enumerate(names)}
