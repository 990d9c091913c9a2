"""Statistics that are safe to send: computed from cases at a site, and coarse enough to be about no single patient.

Of each metric leave its value, the ends of its interval (bootstrap by patient) and its variance; all are multiples of a
step that one patient cannot exceed by far, and ends are rounded outwards, so that an interval only widens. Of the
calibration leaves a histogram of few bins, in which those of few images are empty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from polyclinic.metrics.statistics.intervals import Interval, WeightedMetrics, weighted_bootstrap

#: draws of the bootstrap
DRAWS = 1000
#: patients below which nothing is told: an interval of so few says little, and much about each
FEWEST = 10
#: bins of the calibration
BINS = 5


def safe_intervals(
    metrics: WeightedMetrics,
    cases: int,
    patients: np.ndarray | None,
    least: int,
    bounds: Mapping[str, float] | None = None,
) -> dict[str, list[float]]:
    """Value, low, high and variance of each metric; nothing where there are too few patients.

    `least`: fewest patients of the site's policy; 0 at a simulated site, whose figures stay fine. `bounds`: how much
    one patient can change a metric times their number, 1 if not given.
    """
    count = cases if patients is None else len(np.unique(patients))
    if count < max(FEWEST, least):
        return {}
    found = weighted_bootstrap(metrics, cases, patients=patients, address=("safe", "bootstrap"), draws=DRAWS)
    return {
        name: _told(one, _step((bounds or {}).get(name, 1.0), count, least))
        for name, one in found.items()
        if _fits(one)
    }


def _fits(one: Interval) -> bool:
    return all(math.isfinite(number) for number in (one.value, one.low, one.high))


def _step(bound: float, patients: int, least: int) -> float:
    """1, 2 or 5 times a power of ten, and no smaller than what one patient can change; 0 where nothing is rounded."""
    if least == 0:
        return 0.0
    smallest = bound / patients
    power = 10.0 ** math.floor(math.log10(smallest))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= smallest * (1 - 1e-12))


def _told(one: Interval, step: float) -> list[float]:
    value, low, high = one.value, one.low, one.high
    if step:
        value, low, high = round(value / step) * step, math.floor(low / step) * step, math.ceil(high / step) * step
    return [value, low, high, ((high - low) / (2 * 1.959964)) ** 2]


def rounded_interval(value: float, low: float, high: float, bound: float, patients: int, least: int) -> list[float]:
    """Value, low, high and variance of an interval that was found in another way, such as DeLong's."""
    return _told(Interval(value, low, high), _step(bound, patients, least))


def calibration_counts(probabilities: np.ndarray, labels: np.ndarray, least: int) -> tuple[np.ndarray, np.ndarray]:
    """Images, and those whose class was right, by the probability of the class that was said, int64 [BINS] each; both 0
    in bins of fewer than `least` images."""
    said, best = probabilities.argmax(1), probabilities.max(1)
    place = np.clip((best * BINS).astype(int), 0, BINS - 1)
    images = np.bincount(place, minlength=BINS)
    right = np.bincount(place, weights=said == labels, minlength=BINS).astype(np.int64)
    told = images >= max(least, 1)
    return np.where(told, images, 0), np.where(told, right, 0)


def mean_of_sites(sites: Mapping[str, list[float]]) -> list[float]:
    """Value, low, high and variance of the mean over sites, from those of each: variances of sites add up."""
    values = np.array([told[0] for told in sites.values()])
    variance = float(sum(told[3] for told in sites.values())) / len(values) ** 2
    reach = 1.959964 * math.sqrt(variance)
    return [float(values.mean()), float(values.mean()) - reach, float(values.mean()) + reach, variance]
