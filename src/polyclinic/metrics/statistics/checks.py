"""Checks of what the functions of this package are given."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from polyclinic.errors import BadInput

Numbers = Tensor | np.ndarray | list[float] | tuple[float, ...]


def numbers(values: Numbers, name: str, *, least: int = 1) -> np.ndarray:
    """Values as float64 [N], N being `least` or more, all finite."""
    found = np.asarray(values, dtype=np.float64)
    if found.ndim != 1 or len(found) < least:
        raise BadInput(f"statistics: {name} has shape {found.shape}; give a list of {least} or more numbers")
    if not np.isfinite(found).all():
        raise BadInput(f"statistics: {name} has values that are not finite numbers; leave those cases out")
    return found


def truths(values: Numbers, name: str, cases: int) -> np.ndarray:
    """Zeros and ones, or False and True, as bool [cases]."""
    found = numbers(values, name)
    same_length(found, name, cases)
    if not np.isin(found, (0, 1)).all():
        raise BadInput(f"statistics: {name} must be 0 or 1 for each case")
    return found.astype(bool)


def same_length(values: np.ndarray, name: str, cases: int) -> None:
    if len(values) != cases:
        raise BadInput(f"statistics: {name} has {len(values)} values for {cases} cases; give one for each case")


def class_probabilities(probabilities: Numbers, labels: Numbers | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities float64 [N, C] and labels int64 [N] (empty where none are given).

    Probabilities [N] are those of the second of two classes.
    """
    found = np.asarray(probabilities, dtype=np.float64)
    if found.ndim == 1:
        found = np.stack([1 - found, found], axis=1)
    if found.ndim != 2 or found.shape[1] < 2 or len(found) == 0:
        raise BadInput(f"statistics: probabilities have shape {found.shape}; give [cases, classes]")
    # NaN fails the first comparison; single precision adds up to 1 within a few millionths
    if not (found >= -1e-6).all() or not np.allclose(found.sum(1), 1, atol=1e-4):
        raise BadInput("statistics: the probabilities of each case must be 0 or more and add up to 1")
    return found, np.empty(0, np.int64) if labels is None else class_numbers(labels, *found.shape)


def class_numbers(labels: Numbers, cases: int, classes: int) -> np.ndarray:
    """Labels as int64 [cases], each from 0 to classes - 1."""
    found = numbers(labels, "labels")
    same_length(found, "labels", cases)
    whole = found.astype(np.int64)
    if (whole != found).any() or whole.min() < 0 or whole.max() >= classes:
        raise BadInput(f"statistics: labels must be whole numbers from 0 to {classes - 1}")
    return whole


def share(value: float, name: str) -> float:
    """A number strictly between 0 and 1."""
    if not 0 < value < 1:
        raise BadInput(f"statistics: {name} is {value}; choose a number between 0 and 1")
    return float(value)
