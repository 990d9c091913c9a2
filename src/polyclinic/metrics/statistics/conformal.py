"""Split-conformal prediction: sets of classes and intervals of values that hold the truth with a chosen coverage.

The promise is on average over new cases that come from the same population as the calibration cases, which must not
be training cases. Images of one patient are not independent: calibrate with one of each patient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from polyclinic.errors import BadInput
from polyclinic.metrics.statistics.checks import Numbers, class_probabilities, numbers, same_length, share

COVERAGE = 0.9
Score = Literal["threshold", "adaptive"]


def conformal_quantile(scores: Numbers, coverage: float = COVERAGE) -> float:
    """The k-th lowest of n calibration scores, k = coverage * (n + 1), rounded up.

    A new score lies at or below it with at least this probability. Infinite where n is too small for the coverage.
    """
    found = np.sort(numbers(scores, "scores"))
    # 0.9 * 10 may be 9.000000000000002
    place = math.ceil(share(coverage, "coverage") * (len(found) + 1) - 1e-9)
    return float(found[place - 1]) if place <= len(found) else math.inf


@dataclass(frozen=True)
class ConformalSets:
    """Sets of classes, one for each case.

    `score`: "threshold" takes all classes above one probability and gives the smallest sets, some of them empty
    (Sadinle et al. 2019); "adaptive" takes the most likely classes until their sum is large enough, never none, and
    covers hard cases more evenly (Romano et al. 2020, without its random step: coverage is a little higher).
    """

    quantile: float
    score: Score
    coverage: float

    @classmethod
    def fit(
        cls, probabilities: Numbers, labels: Numbers, *, coverage: float = COVERAGE, score: Score = "adaptive"
    ) -> ConformalSets:
        """From probabilities [N, C] and labels [N] of calibration cases."""
        found, classes = class_probabilities(probabilities, labels)
        own = _scores(found, score)[np.arange(len(found)), classes]
        return cls(conformal_quantile(own, coverage), score, coverage)

    def sets(self, probabilities: Numbers) -> np.ndarray:
        """Which classes are in the set of each case, bool [N, C]."""
        found, _ = class_probabilities(probabilities)
        scores = _scores(found, self.score)
        inside = scores <= self.quantile
        if self.score == "adaptive":
            inside |= scores == scores.min(1, keepdims=True)
        return inside


def _scores(probabilities: np.ndarray, score: str) -> np.ndarray:
    """How little each class conforms, [N, C]."""
    if score == "threshold":
        return 1 - probabilities
    if score != "adaptive":
        raise BadInput(f"statistics: no such conformal score: '{score}'; choose threshold or adaptive")
    order = np.argsort(-probabilities, axis=1, kind="stable")
    # rounding makes some sums 1.0000000000000002: above a quantile of 1, which is to hold every class
    summed = np.minimum(np.take_along_axis(probabilities, order, 1).cumsum(1), 1.0)
    found = np.empty_like(summed)
    np.put_along_axis(found, order, summed, 1)
    return found


@dataclass(frozen=True)
class ConformalIntervals:
    """Intervals of a regression: the prediction, and as far to both sides as most calibration errors reach."""

    reach: float
    coverage: float

    @classmethod
    def fit(cls, predictions: Numbers, labels: Numbers, *, coverage: float = COVERAGE) -> ConformalIntervals:
        """From predictions [N] and labels [N] of calibration cases."""
        found, truth = numbers(predictions, "predictions"), numbers(labels, "labels")
        same_length(truth, "labels", len(found))
        return cls(conformal_quantile(np.abs(found - truth), coverage), coverage)

    def intervals(self, predictions: Numbers) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper ends, [N] each."""
        found = numbers(predictions, "predictions")
        return found - self.reach, found + self.reach
