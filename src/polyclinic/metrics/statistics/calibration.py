"""Probabilities of classes: calibration, Brier score, temperature scaling, operating points, conformal prediction."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy  # its parts are imported when they are named: some take seconds

from polyclinic.errors import BadInput
from polyclinic.metrics.roc import share_interval, threshold
from polyclinic.metrics.statistics.intervals import (
    BINS,
    Interval,
    Numbers,
    class_numbers,
    class_probabilities,
    equal_width_bins,
    numbers,
    same_length,
    share,
    truths,
)

#: temperatures between which the fit looks
COLDEST, HOTTEST = 0.01, 100.0


def calibration_error(probabilities: Numbers, labels: Numbers, *, bins: int = BINS) -> float:
    """The expected calibration error (ECE): how far confidence and accuracy lie apart, a mean over bins by cases.

    Probabilities [N, C] and labels [N]: the confidence is that of the class predicted. Bins have equal width from 0 to
    1; an edge belongs to the bin below it.
    """
    found, classes = class_probabilities(probabilities, labels)
    confidence, right = found.max(1), found.argmax(1) == classes
    gaps = np.bincount(equal_width_bins(confidence, bins), weights=confidence - right)
    return float(np.abs(gaps).sum() / len(right))


def fit_temperature(logits: Numbers, labels: Numbers) -> float:
    """The temperature that makes probabilities of validation logits [N, C] fit their labels best (Guo et al. 2017).

    It needs no more than a site's own validation images. Between 0.01 and 100; the cross-entropy has one minimum.
    """
    found = np.asarray(logits, dtype=np.float64)
    if found.ndim != 2 or found.shape[1] < 2 or len(found) == 0 or not np.isfinite(found).all():
        raise BadInput(f"statistics: logits have shape {found.shape}; give finite numbers [cases, classes]")
    classes = class_numbers(labels, *found.shape)
    own = found[np.arange(len(found)), classes]

    def cross_entropy(log_temperature: float) -> float:
        factor = np.exp(-log_temperature)
        return float((np.logaddexp.reduce(found * factor, axis=1) - own * factor).mean())

    fitted = scipy.optimize.minimize_scalar(
        cross_entropy, bounds=(np.log(COLDEST), np.log(HOTTEST)), method="bounded", options={"xatol": 1e-8}
    )
    return float(np.exp(fitted.x))


def apply_temperature(logits: Numbers, temperature: float) -> np.ndarray:
    """Probabilities [N, C] of logits [N, C] at a temperature; 1 is the plain softmax."""
    if not temperature > 0:
        raise BadInput(f"statistics: temperature is {temperature}; choose a number above 0")
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    return np.exp(scaled - np.logaddexp.reduce(scaled, axis=1, keepdims=True))


# --- operating points -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OperatingPoint:
    """A case is called positive if its score lies above `threshold`. Intervals are exact (Clopper-Pearson); they take
    the threshold as given."""

    threshold: float
    sensitivity: Interval
    specificity: Interval


def sensitivity_at_specificity(scores: Numbers, truth: Numbers, specificity: float = 0.95) -> OperatingPoint:
    """The lowest threshold with at least this specificity, from scores [N] and truth [N], 1 or 0."""
    found = numbers(scores, "scores")
    positive = truths(truth, "truth", len(found))
    if positive.all() or not positive.any():
        raise BadInput("statistics: truth must have positive and negative cases")
    cut = threshold(found[~positive], 1 - share(specificity, "specificity"))
    called = found > cut
    counts = [(int(hits.sum()), len(hits)) for hits in (called[positive], ~called[~positive])]
    sensitivity, specific = (Interval(count / total, *share_interval(count, total)) for count, total in counts)
    return OperatingPoint(cut, sensitivity, specific)


def predictive_values(sensitivity: float, specificity: float, prevalence: float) -> tuple[float, float]:
    """Positive and negative predictive value (PPV, NPV) where this share of all patients has the disease.

    NaN where no result of that kind ever comes.
    """
    for name, value in (("sensitivity", sensitivity), ("specificity", specificity), ("prevalence", prevalence)):
        if not 0 <= value <= 1:
            raise BadInput(f"statistics: {name} is {value}; choose a number from 0 to 1")
    true_positives, missed = sensitivity * prevalence, (1 - sensitivity) * prevalence
    true_negatives, false_alarms = specificity * (1 - prevalence), (1 - specificity) * (1 - prevalence)
    pairs = (true_positives, false_alarms), (true_negatives, missed)
    positive, negative = (right / (right + wrong) if right + wrong > 0 else math.nan for right, wrong in pairs)
    return positive, negative


# --- conformal prediction -------------------------------------------------------------------------------------


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
    ) -> "ConformalSets":
        """From probabilities [N, C] and labels [N] of calibration cases."""
        found, classes = class_probabilities(probabilities, labels)
        own = _scores(found, score)[np.arange(len(found)), classes]
        return cls(conformal_quantile(own, coverage), score, coverage)

    def sets(self, probabilities: Numbers) -> np.ndarray:
        """The classes in the set of each case, bool [N, C]."""
        found, _ = class_probabilities(probabilities)
        scores = _scores(found, self.score)
        inside = scores <= self.quantile
        if self.score == "adaptive":
            inside |= scores == scores.min(1, keepdims=True)
        return inside


def _scores(probabilities: np.ndarray, score: str) -> np.ndarray:
    """Nonconformity of each class, [N, C]."""
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
    def fit(cls, predictions: Numbers, labels: Numbers, *, coverage: float = COVERAGE) -> "ConformalIntervals":
        """From predictions [N] and labels [N] of calibration cases."""
        found, truth = numbers(predictions, "predictions"), numbers(labels, "labels")
        same_length(truth, "labels", len(found))
        return cls(conformal_quantile(np.abs(found - truth), coverage), coverage)

    def intervals(self, predictions: Numbers) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper ends, [N] each."""
        found = numbers(predictions, "predictions")
        return found - self.reach, found + self.reach
