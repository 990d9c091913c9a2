"""Whether probabilities mean what they say: calibration error, Brier score and its parts, temperature scaling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from polyclinic.errors import BadInput
from polyclinic.metrics.statistics.checks import Numbers, class_numbers, class_probabilities

BINS = 15
#: temperatures between which the fit looks
COLDEST, HOTTEST = 0.01, 100.0


def calibration_error(
    probabilities: Numbers,
    labels: Numbers,
    *,
    bins: int = BINS,
    binning: Literal["equal-width", "equal-mass"] = "equal-width",
) -> float:
    """The expected calibration error (ECE): how far confidence and accuracy lie apart, a mean over bins by cases.

    Probabilities [N, C] and labels [N]: the confidence is that of the class predicted. Probabilities [N] and labels 0
    or 1: the probability of class 1 is compared with how often it is true. Bins have equal width from 0 to 1, or
    (nearly) equal numbers of cases; equal confidences share a bin.
    """
    found, classes = class_probabilities(probabilities, labels)
    if np.asarray(probabilities).ndim == 1:
        confidence, right = found[:, 1], classes.astype(np.float64)
    else:
        confidence, right = found.max(1), (found.argmax(1) == classes).astype(np.float64)
    place = _bins(confidence, bins, binning)
    gaps = np.bincount(place, weights=confidence - right)
    return float(np.abs(gaps).sum() / len(right))


def _bins(values: np.ndarray, bins: int, binning: str) -> np.ndarray:
    """The bin of each value [N]; an edge belongs to the bin below it."""
    if bins < 1:
        raise BadInput(f"statistics: bins is {bins}; choose 1 or more")
    if binning == "equal-width":
        return equal_width_bins(values, bins)
    if binning != "equal-mass":
        raise BadInput(f"statistics: no such binning: '{binning}'; choose equal-width or equal-mass")
    edges = np.quantile(values, np.arange(1, bins) / bins, method="inverted_cdf")
    return np.searchsorted(np.unique(edges), values, side="left")


def equal_width_bins(values: np.ndarray, bins: int) -> np.ndarray:
    """The bin of each value [N] from 0 to 1, of so many of equal width."""
    return np.clip(np.ceil(values * bins).astype(np.int64) - 1, 0, bins - 1)


def brier_score(probabilities: Numbers, labels: Numbers) -> float:
    """The mean squared error of probabilities.

    Of probabilities [N] of class 1 it lies between 0 and 1; of probabilities [N, C] the errors of all classes are
    added, so that it lies between 0 and 2 (Brier 1950).
    """
    forecasts, outcomes = _forecasts(probabilities, labels)
    return float(((forecasts - outcomes) ** 2).sum(0).mean())


@dataclass(frozen=True)
class BrierParts:
    """The Brier score as reliability - resolution + uncertainty + within_bins (Murphy 1973, Stephenson et al. 2008).

    `reliability`: how far forecasts lie from what came true (0 is best); `resolution`: how far the outcomes of
    different forecasts differ (more is better); `uncertainty`: of the labels alone; `within_bins`: what forecasts of
    one bin differ by, 0 where they are equal.
    """

    score: float
    reliability: float
    resolution: float
    uncertainty: float
    within_bins: float


def brier_parts(probabilities: Numbers, labels: Numbers, *, bins: int | None = None) -> BrierParts:
    """The parts of the Brier score, of probabilities [N] or [N, C] (the classes' parts are added).

    Forecasts are grouped in `bins` of equal width; without, by equal forecasts.
    """
    forecasts, outcomes = _forecasts(probabilities, labels)
    parts = np.sum([_parts(p, y, bins) for p, y in zip(forecasts, outcomes, strict=True)], axis=0)
    reliability, resolution, uncertainty = (float(part) for part in parts)
    score = float(((forecasts - outcomes) ** 2).sum(0).mean())
    return BrierParts(score, reliability, resolution, uncertainty, score - reliability + resolution - uncertainty)


def _parts(forecasts: np.ndarray, outcomes: np.ndarray, bins: int | None) -> tuple[float, float, float]:
    if bins is None:
        _, place = np.unique(forecasts, return_inverse=True)
    else:
        place = _bins(forecasts, bins, "equal-width")
    counts = np.bincount(place)
    filled = counts > 0
    counts = counts[filled]
    said = np.bincount(place, weights=forecasts)[filled] / counts
    came = np.bincount(place, weights=outcomes)[filled] / counts
    rate = outcomes.mean()
    weights = counts / len(forecasts)
    return (weights * (said - came) ** 2).sum(), (weights * (came - rate) ** 2).sum(), rate * (1 - rate)


def _forecasts(probabilities: Numbers, labels: Numbers) -> tuple[np.ndarray, np.ndarray]:
    """Forecasts and outcomes (0 or 1), [K, N]: of class 1 for probabilities [N], of all classes for [N, C]."""
    found, classes = class_probabilities(probabilities, labels)
    outcomes = np.eye(found.shape[1])[classes]
    first = 1 if np.asarray(probabilities).ndim == 1 else 0
    return found.T[first:], outcomes.T[first:]


def fit_temperature(logits: Numbers, labels: Numbers) -> float:
    """The temperature that makes probabilities of validation logits [N, C] fit their labels best (Guo et al. 2017).

    It needs no more than a site's own validation images. Between 0.01 and 100; the cross-entropy has one minimum.
    """
    from scipy import optimize

    found = np.asarray(logits, dtype=np.float64)
    if found.ndim != 2 or found.shape[1] < 2 or len(found) == 0 or not np.isfinite(found).all():
        raise BadInput(f"statistics: logits have shape {found.shape}; give finite numbers [cases, classes]")
    classes = class_numbers(labels, *found.shape)
    own = found[np.arange(len(found)), classes]

    def cross_entropy(log_temperature: float) -> float:
        factor = np.exp(-log_temperature)
        return float((np.logaddexp.reduce(found * factor, axis=1) - own * factor).mean())

    fitted = optimize.minimize_scalar(
        cross_entropy, bounds=(np.log(COLDEST), np.log(HOTTEST)), method="bounded", options={"xatol": 1e-8}
    )
    return float(np.exp(fitted.x))


def apply_temperature(logits: Numbers, temperature: float) -> np.ndarray:
    """Probabilities [N, C] of logits [N, C] at a temperature; 1 is the plain softmax."""
    if not temperature > 0:
        raise BadInput(f"statistics: temperature is {temperature}; choose a number above 0")
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    return np.exp(scaled - np.logaddexp.reduce(scaled, axis=1, keepdims=True))
