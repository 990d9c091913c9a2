"""Intervals against scipy and statsmodels; whole patients are drawn. Agreement against Bland and Altman (1986)."""

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as sklearn_metrics
from statsmodels.stats.weightstats import DescrStatsW

from polyclinic.metrics.statistics import (
    Interval,
    bland_altman,
    calibration_error,
    classification_metrics,
    mean_interval,
    mean_metrics,
    regression_metrics,
    weighted_bootstrap,
)
from polyclinic.metrics.statistics.intervals import rows_by_patient
from polyclinic.randomness import numpy_rng

ADDRESS = ("test", 3)


def test_mean_interval_is_statsmodels_and_by_hand_and_wider_with_folds():
    values = [0.81, 0.84, 0.79, 0.86]
    found = mean_interval(values, confidence=0.9)
    assert (found.low, found.high) == pytest.approx(DescrStatsW(values).tconfint_mean(0.1), abs=1e-12)
    # two values, 0 and 2: mean 1, standard error 1, t(0.975, 1) = 12.7062
    assert mean_interval([0, 2]).high == pytest.approx(13.7062, abs=1e-4)
    assert str(mean_interval([0, 2])) == "1.000 [-11.706, 13.706]"
    plain, folds = mean_interval([0, 1, 2, 3, 4]), mean_interval([0, 1, 2, 3, 4], overlap=1 / 4)
    assert (folds.high - 2) / (plain.high - 2) == pytest.approx(((1 / 5 + 1 / 4) * 5) ** 0.5)


def bootstrap(values: np.ndarray, **options) -> Interval:
    """The interval of the mean of values."""
    return weighted_bootstrap(mean_metrics({"mean": np.asarray(values)}), len(values), **options)["mean"]


@pytest.mark.parametrize("kind", ["bca", "percentile"])
def test_bootstrap_of_independent_cases_is_scipys(kind):
    values = np.random.default_rng(0).exponential(size=25)
    ours = bootstrap(values, address=ADDRESS, draws=400, kind=kind)
    theirs = stats.bootstrap((values,), np.mean, n_resamples=400, method=kind, rng=numpy_rng(*ADDRESS))
    expected = theirs.confidence_interval
    assert (ours.low, ours.high) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_an_address_names_the_draws_of_whole_patients():
    first, again, other = (bootstrap(np.arange(10.0), address=(seed,), draws=50) for seed in (1, 1, 2))
    assert first == again != other
    patients = ["b", "a", "b", "c", "a", "a"]
    seen: list[np.ndarray] = []

    def metrics(weights):
        seen.append(weights)
        return {"size": weights.sum(1)}

    weighted_bootstrap(metrics, 6, patients=patients, draws=30)
    for times in np.concatenate(seen):
        assert times[0] == times[2]
        assert times[1] == times[4] == times[5]
    assert [group.tolist() for group in rows_by_patient(patients, 6)] == [[0, 2], [1, 4, 5], [3]]


def test_copies_of_each_case_narrow_the_interval_unless_drawn_by_patient():
    values = np.random.default_rng(1).normal(size=20)
    copied, patients = np.tile(values, 4), np.tile(np.arange(20), 4)
    options = {"address": ADDRESS, "draws": 300}
    once, by_image = bootstrap(values, **options), bootstrap(copied, **options)
    by_patient = bootstrap(copied, patients=patients, **options)
    assert (by_patient.low, by_patient.high) == pytest.approx((once.low, once.high), abs=1e-12)
    assert by_image.high - by_image.low < 0.7 * (once.high - once.low)


def test_draws_without_positive_cases_do_not_count():
    scores, truth = np.array([0.9, 0.8, 0.3, 0.2, 0.85]), np.array([1, 1, 0, 0, 0])
    said = np.stack([1 - scores, scores], 1)
    metrics = classification_metrics(said, truth, said)

    def some(weights):
        rarely = np.where((weights == 1).all(1), 1.0, np.nan)  # defined for all cases, and for few draws
        return {"auc": metrics(weights)["auc"], "never": np.full(len(weights), np.nan), "rarely": rarely}

    found = weighted_bootstrap(some, 5, draws=200, kind="percentile")
    assert list(found) == ["auc"]
    assert 0 <= found["auc"].low <= found["auc"].value <= found["auc"].high <= 1


WRIGHT = [494, 395, 516, 434, 476, 557, 413, 442, 650, 433, 417, 656, 267, 478, 178, 423, 427]
MINI = [512, 430, 520, 428, 500, 600, 364, 380, 658, 445, 432, 626, 260, 477, 259, 350, 451]


def test_published_example():
    found = bland_altman(WRIGHT, MINI)
    assert (found.bias.value, found.deviation) == (pytest.approx(-2.1, abs=0.05), pytest.approx(38.8, abs=0.05))
    assert found.n == 17
    assert (found.bias.low, found.bias.high) == (pytest.approx(-22.0, abs=0.1), pytest.approx(17.8, abs=0.1))
    # the paper takes 2 standard deviations: -79.7 and 75.5
    assert found.lower.value == pytest.approx(-79.7 + 0.04 * 38.8, abs=0.1)
    assert found.upper.value == pytest.approx(75.5 - 0.04 * 38.8, abs=0.1)
    # and 3 s^2 / n for the variance of a limit, a reach of 34.6; with the formula of 1999 it is 34.8
    assert found.upper.high - found.upper.value == pytest.approx(34.8, abs=0.1)
    assert found.lower.value - found.lower.low == pytest.approx(34.8, abs=0.1)


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
        guess, asked = found.argmax(1), range(1, 2) if classes == 2 else range(classes)
        areas = [sklearn_metrics.roc_auc_score(labels == c, scores[:, c], sample_weight=weight) for c in asked]
        expected = {
            "accuracy": sklearn_metrics.accuracy_score(labels, guess, sample_weight=weight),
            "balanced_accuracy": sklearn_metrics.balanced_accuracy_score(labels, guess, sample_weight=weight),
            "loss": sklearn_metrics.log_loss(labels, found, sample_weight=weight),
            "auc": np.mean(areas),
        }
        assert {name: metrics[name][d] for name in expected} == pytest.approx(expected)


def test_brier_and_weights_of_two_are_what_scikit_learn_and_two_cases_say():
    found, labels, scores = probabilities(2)
    metrics = classification_metrics(found, labels, scores)(np.ones((1, N)))
    assert metrics["brier"][0] == pytest.approx(sklearn_metrics.brier_score_loss(labels, found[:, 1]))
    assert metrics["calibration_error"][0] == pytest.approx(calibration_error(found, labels))
    many, labels, scores = probabilities(3)
    expected = sklearn_metrics.brier_score_loss(labels, many, labels=[0, 1, 2], scale_by_half=False)
    assert classification_metrics(many, labels, scores)(np.ones((1, N)))["brier"][0] == pytest.approx(expected)
    found, labels, scores = probabilities(3)
    twice = np.r_[np.arange(N), 0, 1, 2]
    weight = np.ones(N)
    weight[:3] = 2
    once = classification_metrics(found, labels, scores)(weight[None])
    again = classification_metrics(found[twice], labels[twice], scores[twice])(np.ones((1, N + 3)))
    first, second = ({name: values[0] for name, values in one.items()} for one in (once, again))
    assert first == pytest.approx(second)


def test_regression_and_means_by_hand_and_no_auc_without_a_class():
    found, labels, scores = probabilities(2)
    metrics = classification_metrics(found, labels, scores)(np.stack([labels == 1, np.ones(N)]).astype(float))
    assert np.isnan(metrics["auc"]).tolist() == [True, False]
    assert np.isnan(metrics["balanced_accuracy"]).tolist() == [True, False]
    metrics = regression_metrics([11.0, 8.0, 10.0], [10.0, 10.0, 10.0])(np.array([[1.0, 1, 1], [0, 2, 0]]))
    assert metrics["mae"].tolist() == [1.0, 2.0]
    assert metrics["bias"].tolist() == [pytest.approx(-1 / 3), -2.0]
    assert metrics["rmse"].tolist() == [pytest.approx(np.sqrt(5 / 3)), 2.0]
    means = mean_metrics({"dice": np.array([1.0, np.nan, 0.5])})(np.array([[1.0, 5, 1], [0, 1, 0]]))
    assert means["dice"][0] == 0.75
    assert np.isnan(means["dice"][1])


def test_pieces_do_not_change_the_intervals(monkeypatch):
    metrics = regression_metrics(RNG.normal(size=N), RNG.normal(size=N))
    whole = weighted_bootstrap(metrics, N, draws=50)
    monkeypatch.setattr("polyclinic.metrics.statistics.intervals.CELLS", 7 * N)
    pieces = weighted_bootstrap(metrics, N, draws=50)
    first, second = ([(one.low, one.high) for one in found.values()] for found in (pieces, whole))
    assert first == [pytest.approx(one) for one in second]
