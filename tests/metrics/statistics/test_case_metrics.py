"""Metrics of weighted cases against scikit-learn; the fast bootstrap against the one that draws rows."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics as sklearn_metrics

from polyclinic.metrics.statistics import (
    bootstrap_intervals,
    brier_score,
    calibration_error,
    classification_metrics,
    mean_metrics,
    regression_metrics,
    weighted_bootstrap,
)

RNG = np.random.default_rng(3)
N = 40


def probabilities(classes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Probabilities with some ties, scores that rank alike, and labels of every class."""
    labels = np.arange(N) % classes
    logits = RNG.normal(size=(N, classes)).round(1) + 1.5 * np.eye(classes)[labels]
    found = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return found, labels, np.log(found) - np.log1p(-found)


def weights(draws: int = 3) -> np.ndarray:
    return np.stack([np.ones(N), *RNG.integers(0, 4, (draws - 1, N)).astype(float)])


@pytest.mark.parametrize("classes", [2, 3])
def test_classification_under_weights_is_what_scikit_learn_says(classes):
    found, labels, scores = probabilities(classes)
    drawn = weights()
    metrics = classification_metrics(found, labels, scores)(drawn)
    for d, weight in enumerate(drawn):
        guess = found.argmax(1)
        expected = {
            "accuracy": sklearn_metrics.accuracy_score(labels, guess, sample_weight=weight),
            "balanced_accuracy": sklearn_metrics.balanced_accuracy_score(labels, guess, sample_weight=weight),
            "loss": sklearn_metrics.log_loss(labels, found, sample_weight=weight),
            "auc": np.mean(
                [
                    sklearn_metrics.roc_auc_score(labels == c, scores[:, c], sample_weight=weight)
                    for c in (range(1, 2) if classes == 2 else range(classes))
                ]
            ),
        }
        assert {name: metrics[name][d] for name in expected} == pytest.approx(expected)


def test_brier_and_calibration_error_are_those_of_the_statistics_module():
    found, labels, scores = probabilities(2)
    metrics = classification_metrics(found, labels, scores)(np.ones((1, N)))
    assert metrics["brier"][0] == pytest.approx(brier_score(found[:, 1], labels))
    assert metrics["brier"][0] == pytest.approx(sklearn_metrics.brier_score_loss(labels, found[:, 1]))
    assert metrics["calibration_error"][0] == pytest.approx(calibration_error(found, labels))
    many, labels, scores = probabilities(3)
    assert classification_metrics(many, labels, scores)(np.ones((1, N)))["brier"][0] == pytest.approx(
        brier_score(many, labels)
    )


def test_a_case_of_weight_two_counts_as_two_cases():
    found, labels, scores = probabilities(3)
    twice = np.r_[np.arange(N), 0, 1, 2]
    weight = np.ones(N)
    weight[:3] = 2
    once = classification_metrics(found, labels, scores)(weight[None])
    again = classification_metrics(found[twice], labels[twice], scores[twice])(np.ones((1, N + 3)))
    assert {name: values[0] for name, values in once.items()} == pytest.approx(
        {name: values[0] for name, values in again.items()}
    )


def test_a_draw_without_a_class_has_no_auc_and_no_balanced_accuracy():
    found, labels, scores = probabilities(2)
    metrics = classification_metrics(found, labels, scores)(np.stack([labels == 1, np.ones(N)]).astype(float))
    assert np.isnan(metrics["auc"]).tolist() == [True, False]
    assert np.isnan(metrics["balanced_accuracy"]).tolist() == [True, False]


def test_regression_and_means_by_hand():
    metrics = regression_metrics([11.0, 8.0, 10.0], [10.0, 10.0, 10.0])(np.array([[1.0, 1, 1], [0, 2, 0]]))
    assert metrics["mae"].tolist() == [1.0, 2.0]
    assert metrics["bias"].tolist() == [pytest.approx(-1 / 3), -2.0]
    assert metrics["rmse"].tolist() == [pytest.approx(np.sqrt(5 / 3)), 2.0]
    means = mean_metrics({"dice": np.array([1.0, np.nan, 0.5])})(np.array([[1.0, 5, 1], [0, 1, 0]]))
    assert means["dice"][0] == 0.75
    assert np.isnan(means["dice"][1])


@pytest.mark.parametrize("kind", ["bca", "percentile"])
def test_the_fast_bootstrap_gives_the_intervals_of_the_slow_one(kind):
    found, labels, scores = probabilities(2)
    patients = np.arange(N) // 2
    fast = classification_metrics(found, labels, scores)

    def slow(rows: np.ndarray) -> dict[str, float]:
        some = classification_metrics(found[rows], labels[rows], scores[rows])(np.ones((1, len(rows))))
        return {name: float(values[0]) for name, values in some.items()}

    settings = {"patients": patients, "draws": 60, "kind": kind, "address": ("test",)}
    ours, expected = weighted_bootstrap(fast, N, **settings), bootstrap_intervals(slow, N, **settings)
    assert ours.keys() == expected.keys() >= {"auc", "brier"}
    for name, interval in expected.items():
        assert (ours[name].value, ours[name].low, ours[name].high) == pytest.approx(
            (interval.value, interval.low, interval.high)
        )


def test_pieces_do_not_change_the_intervals(monkeypatch):
    metrics = regression_metrics(RNG.normal(size=N), RNG.normal(size=N))
    whole = weighted_bootstrap(metrics, N, draws=50)
    monkeypatch.setattr("polyclinic.metrics.statistics.intervals.CELLS", 7 * N)
    pieces = weighted_bootstrap(metrics, N, draws=50)
    assert {name: (one.low, one.high) for name, one in pieces.items()} == {
        name: pytest.approx((one.low, one.high)) for name, one in whole.items()
    }
