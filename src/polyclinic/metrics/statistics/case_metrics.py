"""Metrics of weighted cases, of many draws at once: what a bootstrap of hundreds of draws needs to take milliseconds.

Each function takes what is known of N cases and gives a function of weights [D, N] (how often each of D draws has each
case), which gives each metric of every draw, {name: [D]}; NaN where a draw does not define it. With weights of 1 they
are the metrics of the cases themselves.
"""

from __future__ import annotations

import numpy as np

from polyclinic.metrics.roc import aucs_from_counts
from polyclinic.metrics.statistics.calibration import BINS, equal_width_bins
from polyclinic.metrics.statistics.intervals import Numbers, WeightedMetrics, class_probabilities, numbers, same_length


def classification_metrics(probabilities: Numbers, labels: Numbers, scores: Numbers) -> WeightedMetrics:
    """accuracy, balanced_accuracy, auc, loss, calibration_error and brier, from probabilities [N, C] and labels [N].

    `scores` [N, C] rank the cases for the AUC, as the classes' margins do; of two classes the second counts, of more
    each against all others. The Brier score of two classes is that of the second, between 0 and 1.
    """
    found, classes = class_probabilities(probabilities, labels)
    right = (found.argmax(1) == classes).astype(np.float64)
    own = np.eye(found.shape[1], dtype=np.float64)[classes]
    rows, binary = np.arange(len(classes)), found.shape[1] == 2
    loss = -np.log(np.clip(found[rows, classes], 1e-300, None))
    squares = ((found - own) ** 2)[:, 1:].sum(1) if binary else ((found - own) ** 2).sum(1)
    ranks = [Ranks(np.asarray(scores)[:, c], own[:, c]) for c in (range(1, 2) if binary else range(found.shape[1]))]
    gaps = _by_bin(found.max(1) - right, equal_width_bins(found.max(1), BINS), BINS)
    present = own[:, own.any(0)]

    def metrics(weights: np.ndarray) -> dict[str, np.ndarray]:
        total = weights.sum(1)
        areas = np.stack([rank.auc(weights) for rank in ranks], 1)
        defined = [one for one in areas.T if not np.isnan(one).all()]
        return {
            "accuracy": weights @ right / total,
            "balanced_accuracy": _ratio(weights @ (present * right[:, None]), weights @ present).mean(1),
            "loss": weights @ loss / total,
            "brier": weights @ squares / total,
            "calibration_error": np.abs(weights @ gaps).sum(1) / total,
            **({"auc": np.stack(defined, 1).mean(1)} if defined else {}),
        }

    return metrics


def regression_metrics(predictions: Numbers, labels: Numbers) -> WeightedMetrics:
    """mae, rmse and bias (the mean of predicted minus true), from values [N] in the label's unit."""
    found, truth = numbers(predictions, "predictions"), numbers(labels, "labels")
    same_length(truth, "labels", len(found))
    errors = found - truth

    def metrics(weights: np.ndarray) -> dict[str, np.ndarray]:
        total = weights.sum(1)
        return {
            "mae": weights @ np.abs(errors) / total,
            "rmse": np.sqrt(weights @ errors**2 / total),
            "bias": weights @ errors / total,
        }

    return metrics


def mean_metrics(values: dict[str, np.ndarray]) -> WeightedMetrics:
    """The mean of each named value [N] over the cases that have one (NaN is none), such as Dice of each patient."""
    known = {name: ~np.isnan(found) for name, found in values.items()}

    def metrics(weights: np.ndarray) -> dict[str, np.ndarray]:
        return {
            name: _ratio(weights @ np.where(known[name], found, 0.0), weights @ known[name].astype(np.float64))
            for name, found in values.items()
        }

    return metrics


class Ranks:
    """The AUC of scores [N] for truth [N], 0 or 1, under weights; ties count half."""

    def __init__(self, scores: np.ndarray, truth: np.ndarray) -> None:
        self.order = np.argsort(scores, kind="stable")
        ordered = np.asarray(scores, dtype=np.float64)[self.order]
        #: where a new score begins
        self.starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
        self.truth = np.asarray(truth, dtype=np.float64)[self.order]

    def auc(self, weights: np.ndarray) -> np.ndarray:
        """[D] of weights [D, N]; NaN for a draw without positive or without negative cases."""
        ordered = weights[:, self.order]
        own = np.add.reduceat(ordered * self.truth, self.starts, axis=1)
        rest = np.add.reduceat(ordered * (1 - self.truth), self.starts, axis=1)
        return aucs_from_counts(own, rest)


def _by_bin(values: np.ndarray, place: np.ndarray, bins: int) -> np.ndarray:
    """Values [N] in the column of their bin, zeros elsewhere: [N, filled bins]."""
    table = np.zeros((len(values), bins))
    table[np.arange(len(values)), place] = values
    return table[:, np.bincount(place, minlength=bins) > 0]


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """part / whole, NaN where whole is 0."""
    return np.divide(part, whole, out=np.full(np.shape(part), np.nan), where=whole > 0)
