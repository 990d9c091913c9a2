"""ROC and precision-recall curves of scores, every threshold that makes a difference."""

from __future__ import annotations

import numpy as np


def _counts(scores: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """True and false positives at or above each score that occurs, from the highest down."""
    order = np.argsort(-scores, kind="stable")
    ordered, positive = scores[order], np.asarray(truth, dtype=bool)[order]
    last = np.r_[np.flatnonzero(ordered[1:] != ordered[:-1]), len(ordered) - 1]  # of each group of equal scores
    return np.cumsum(positive)[last], np.cumsum(~positive)[last]


def roc_curve(scores: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """1 - specificity and sensitivity, from (0, 0) to (1, 1)."""
    true, false = _counts(scores, truth)
    return np.r_[0.0, false / false[-1]], np.r_[0.0, true / true[-1]]


def precision_recall(scores: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Recall and precision, from recall 0 up; the first point has the precision of the highest score."""
    true, false = _counts(scores, truth)
    precision = true / (true + false)
    return np.r_[0.0, true / true[-1]], np.r_[precision[0], precision]


def few_points(x: np.ndarray, y: np.ndarray, most: int = 1000) -> tuple[np.ndarray, np.ndarray]:
    """So many points of a curve at most, evenly chosen, its ends among them: a page need not hold a million."""
    if len(x) <= most:
        return x, y
    chosen = np.unique(np.linspace(0, len(x) - 1, most).round().astype(int))
    return x[chosen], y[chosen]


def average_precision(scores: np.ndarray, truth: np.ndarray) -> float:
    """The area under the precision-recall curve, a sum of steps (as scikit-learn has it)."""
    true, false = _counts(scores, truth)
    return float(np.sum(np.diff(np.r_[0, true]) / true[-1] * true / (true + false)))
