"""DeLong's variance of an AUC, its interval, and the paired test of two models on the same cases (1988)."""

from __future__ import annotations

import numpy as np

from polyclinic.errors import BadInput
from polyclinic.metrics.roc import CONFIDENCE, auc, auc_interval, placements
from polyclinic.metrics.statistics.checks import Numbers, numbers, share, truths
from polyclinic.metrics.statistics.intervals import Interval
from polyclinic.metrics.statistics.significance import Difference


def delong_variance(scores: Numbers, truth: Numbers) -> float:
    """The variance of the AUC of scores [N] for truth [N], 1 or 0. Cases count as independent: one of each patient."""
    return float(_covariance([_split(scores, truth)])[0, 0])


def delong_interval(scores: Numbers, truth: Numbers, *, confidence: float = CONFIDENCE) -> Interval:
    """The AUC with DeLong's interval on the logit (see `metrics.roc.auc_interval`)."""
    return Interval(*auc_interval(*_split(scores, truth), share(confidence, "confidence")), confidence)


def delong_test(first: Numbers, second: Numbers, truth: Numbers, *, confidence: float = CONFIDENCE) -> Difference:
    """Compare the AUCs of two models' scores [N] on the same cases: first minus second, interval and p value.

    One pair of AUCs is one test, so `p_holm` is p. Where both models separate the classes perfectly, or rank all pairs
    alike, p is 1.
    """
    from scipy import stats

    pairs = [_split(first, truth), _split(second, truth)]
    difference = auc(*pairs[0]) - auc(*pairs[1])
    (one, both), (_, two) = _covariance(pairs)
    deviation = float(np.sqrt(max(0.0, one + two - 2 * both)))
    if deviation < 1e-12:  # what rounding leaves of zero
        if abs(difference) > 1e-12:
            raise BadInput("statistics: DeLong's variance is zero here; compare these two models by McNemar's test")
        return Difference(0.0, 0.0, 0.0, 1.0, 1.0, len(numbers(truth, "truth")))
    reach = float(stats.norm.ppf((1 + share(confidence, "confidence")) / 2)) * deviation
    p = float(2 * stats.norm.sf(abs(difference) / deviation))
    return Difference(difference, difference - reach, difference + reach, p, p, len(numbers(truth, "truth")))


def _split(scores: Numbers, truth: Numbers) -> tuple[np.ndarray, np.ndarray]:
    """Scores of positive and of negative cases."""
    found = numbers(scores, "scores")
    positive = truths(truth, "truth", len(found))
    if positive.sum() < 2 or (~positive).sum() < 2:
        raise BadInput("statistics: DeLong's method needs two positive and two negative cases or more")
    return found[positive], found[~positive]


def _covariance(pairs: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Covariances [K, K] of the AUCs of K models, from the scores of their positive and negative cases."""
    of_positives, of_negatives = zip(*(placements(*pair) for pair in pairs), strict=True)
    parts = (np.atleast_2d(np.cov(np.stack(rows))) / len(rows[0]) for rows in (of_positives, of_negatives))
    return sum(parts, np.zeros((len(pairs), len(pairs))))
