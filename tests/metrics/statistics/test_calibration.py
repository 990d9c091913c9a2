"""Calibration, operating points and conformal sets against scikit-learn and arithmetic by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss, roc_curve
from statsmodels.stats.proportion import proportion_confint

from polyclinic.metrics.statistics import (
    ConformalIntervals,
    ConformalSets,
    apply_temperature,
    brier_parts,
    brier_score,
    calibration_error,
    conformal_quantile,
    fit_temperature,
    predictive_values,
    sensitivity_at_specificity,
)


def binary(seed: int = 0, n: int = 400) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    probabilities = rng.uniform(size=n)
    return probabilities, (rng.uniform(size=n) < probabilities**2).astype(int)


def several(seed: int = 0, n: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """Logits of three classes, and labels drawn from their softmax at a temperature of 2."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (n, 3))
    return logits, np.array([rng.choice(3, p=row) for row in apply_temperature(logits, 2.0)])


def test_calibration_error_by_hand():
    # (0, 0.5]: says 0.2 + 0.4, comes 1 of 2; (0.5, 1]: says 0.9 + 0.7, comes 1 of 2; gaps 0.4 and 0.6 of 4 cases
    assert calibration_error([0.2, 0.4, 0.9, 0.7], [0, 1, 1, 0], bins=2) == pytest.approx((0.4 + 0.6) / 4)
    # of the classes predicted: 0.8 right, 0.6 wrong; one bin says 1.4, comes 1
    assert calibration_error([[0.8, 0.2], [0.4, 0.6]], [0, 0], bins=1) == pytest.approx(0.4 / 2)
    assert calibration_error([1.0, 0.0, 1.0], [1, 0, 1]) == 0


@pytest.mark.parametrize(("binning", "strategy"), [("equal-width", "uniform"), ("equal-mass", "quantile")])
def test_calibration_error_has_scikit_learns_bins(binning, strategy):
    probabilities, labels = binary(n=401)  # 401: scikit-learn's edges, between two cases, are cases then
    came, said = calibration_curve(labels, probabilities, n_bins=10, strategy=strategy)
    if strategy == "uniform":
        counts = np.bincount(np.clip((probabilities * 10).astype(int), 0, 9))
    else:
        edges = np.quantile(probabilities, np.linspace(0, 1, 11))
        counts = np.bincount(np.searchsorted(edges[1:-1], probabilities), minlength=10)
    expected = (np.abs(came - said) * counts).sum() / len(labels)
    assert calibration_error(probabilities, labels, bins=10, binning=binning) == pytest.approx(expected, abs=1e-12)


def test_bins_of_equal_mass_keep_equal_forecasts_together():
    # six forecasts of 0.5, half of them true: one bin with no gap, however many bins were asked for
    assert calibration_error([0.5] * 6, [1, 0, 1, 0, 1, 0], bins=3, binning="equal-mass") == 0


def test_brier_score_is_scikit_learns():
    probabilities, labels = binary()
    assert brier_score(probabilities, labels) == pytest.approx(brier_score_loss(labels, probabilities), abs=1e-12)
    logits, labels = several()
    found = apply_temperature(logits, 1.0)
    expected = brier_score_loss(labels, found, labels=[0, 1, 2], scale_by_half=False)
    assert brier_score(found, labels) == pytest.approx(expected, abs=1e-12)
    assert brier_score(torch.tensor([[0.7, 0.3]]), torch.tensor([0])) == pytest.approx(0.18)


def test_parts_of_the_brier_score_by_hand():
    # 0.8 said twice: came 1 and 0 (0.5); 0.2 said twice: came 0 and 0; rate 1/4
    parts = brier_parts([0.8, 0.8, 0.2, 0.2], [1, 0, 0, 0])
    assert parts.reliability == pytest.approx((0.3**2 + 0.2**2) / 2)
    assert parts.resolution == pytest.approx(0.25**2)
    assert parts.uncertainty == pytest.approx(3 / 16)
    assert parts.within_bins == pytest.approx(0, abs=1e-15)
    assert parts.score == pytest.approx((0.04 + 0.64 + 0.04 + 0.04) / 4)


def test_parts_within_bins_are_variance_and_covariance_within_bins():
    probabilities, labels = binary()
    place = np.clip(np.ceil(probabilities * 5).astype(int) - 1, 0, 4)
    expected = 0.0
    for number in range(5):
        p, y = probabilities[place == number], labels[place == number]
        expected += len(p) / len(labels) * (p.var() - 2 * ((p - p.mean()) * (y - y.mean())).mean())
    assert brier_parts(probabilities, labels, bins=5).within_bins == pytest.approx(expected, abs=1e-12)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000))
def test_equal_forecasts_leave_nothing_within_bins(seed):
    rng = np.random.default_rng(seed)
    probabilities, labels = rng.integers(0, 6, 40) / 5, rng.integers(0, 2, 40)
    parts = brier_parts(probabilities, labels)
    assert parts.within_bins == pytest.approx(0, abs=1e-12)
    assert min(parts.reliability, parts.resolution, parts.uncertainty) >= 0
    both = brier_parts(np.stack([1 - probabilities, probabilities], 1), labels)
    assert both.score == pytest.approx(2 * parts.score)
    assert both.resolution == pytest.approx(2 * parts.resolution)


def test_temperature_scales_with_the_logits():
    logits, labels = several()
    found = fit_temperature(logits, labels)
    assert found == pytest.approx(2, rel=0.25)  # labels were drawn at 2
    assert fit_temperature(logits * 3, labels) == pytest.approx(3 * found, rel=1e-5)
    assert fit_temperature(torch.tensor(logits) + 7, torch.tensor(labels)) == pytest.approx(found, rel=1e-5)


def test_the_slope_of_the_cross_entropy_is_zero_at_the_temperature():
    """The slope by the inverse temperature: the mean logit that probabilities expect, minus that of the labels."""
    logits, labels = several(1)
    own = logits[np.arange(len(labels)), labels].mean()
    slope = lambda inverse: (apply_temperature(logits, 1 / inverse) * logits).sum(1).mean() - own  # noqa: E731
    assert fit_temperature(logits, labels) == pytest.approx(1 / optimize.brentq(slope, 0.05, 5), rel=1e-6)


def test_temperature_lowers_the_calibration_error_and_keeps_the_classes():
    logits, labels = several(2, 2000)
    before, after = apply_temperature(logits, 1.0), apply_temperature(logits, fit_temperature(logits, labels))
    assert calibration_error(after, labels) < 0.5 * calibration_error(before, labels)
    assert (after.argmax(1) == before.argmax(1)).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([0.9, 0.95, 0.5]), st.sampled_from([5, 1000]))
def test_sensitivity_is_the_highest_on_scikit_learns_curve(seed, specificity, levels):
    rng = np.random.default_rng(seed)
    truth = np.append(rng.integers(0, 2, 60), [0, 1])
    scores = rng.integers(0, levels, 62) + levels // 3 * truth
    found = sensitivity_at_specificity(scores, truth, specificity)
    false, true, _ = roc_curve(truth, scores, drop_intermediate=False)
    assert found.sensitivity.value == pytest.approx(true[1 - false >= specificity - 1e-9].max())
    assert found.specificity.value >= specificity - 1e-9


def test_operating_point_by_hand():
    found = sensitivity_at_specificity([0.9, 0.8, 0.35, 0.1, 0.2, 0.3, 0.4, 0.5], [1, 1, 1, 0, 0, 0, 0, 0], 0.8)
    assert found.threshold == 0.4
    assert (found.sensitivity.value, found.specificity.value) == (pytest.approx(2 / 3), 0.8)
    expected = proportion_confint(2, 3, method="beta")
    assert (found.sensitivity.low, found.sensitivity.high) == pytest.approx(expected, abs=1e-9)


def test_predictive_values_by_hand():
    # of 1000 patients 100 are ill: 90 found and 10 missed; of 900 others 45 false alarms
    assert predictive_values(0.9, 0.95, 0.1) == pytest.approx((90 / 135, 855 / 865))
    assert predictive_values(0.5, 0.5, 0.3) == pytest.approx((0.3, 0.7))  # a coin tells nothing
    assert math.isnan(predictive_values(0.0, 1.0, 0.5)[0])


def test_quantile_by_hand():
    # of 9 scores: 0.9 * 10 = 9, the highest; of 8: 8.1, more than there are
    assert conformal_quantile(range(1, 10), 0.9) == 9
    assert conformal_quantile(range(1, 9), 0.9) == math.inf
    assert conformal_quantile([3, 1, 2], 0.5) == 2
    assert conformal_quantile(range(1, 20), 0.9) == 18


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=2, max_size=30), st.sampled_from([0.5, 0.8, 0.9]))
def test_each_case_is_covered_by_the_others_as_often_as_promised(scores, coverage):
    """Leave out each score in turn: exact for any scores, ties included."""
    held = [score <= conformal_quantile(scores[:i] + scores[i + 1 :], coverage) for i, score in enumerate(scores)]
    assert np.mean(held) >= coverage


def test_sets_by_hand():
    probabilities = [[0.7, 0.2, 0.1], [0.4, 0.35, 0.25], [0.1, 0.1, 0.8]]
    # scores of the true classes: 0.3, 0.65, 0.2; half of 4 is the second: 0.3
    sets = ConformalSets.fit(probabilities, [0, 1, 2], coverage=0.5, score="threshold")
    assert sets.quantile == pytest.approx(0.3)
    assert sets.sets([[0.75, 0.15, 0.1], [0.4, 0.3, 0.3]]).tolist() == [[True, False, False], [False] * 3]
    # sums up to the true class: 0.7, 0.75, 0.8
    sets = ConformalSets.fit(probabilities, [0, 1, 2], coverage=0.5, score="adaptive")
    assert sets.quantile == pytest.approx(0.75)
    found = sets.sets([[0.5, 0.2, 0.3], [0.9, 0.06, 0.04], [0.2, 0.4, 0.4]])
    assert found.tolist() == [[True, False, False], [True, False, False], [False, True, False]]


@pytest.mark.parametrize("score", ["threshold", "adaptive"])
def test_sets_cover_new_cases(score):
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (4000, 4))
    labels = np.array([rng.choice(4, p=row) for row in apply_temperature(logits, 1.5)])
    said = apply_temperature(logits, 1.0)  # too sure of itself: the sets must mend it
    fitted = ConformalSets.fit(said[:2000], labels[:2000], coverage=0.9, score=score)
    sets = fitted.sets(said[2000:])
    covered = sets[np.arange(2000), labels[2000:]].mean()
    assert 0.88 < covered < (0.92 if score == "threshold" else 1.0)
    assert sets.any(1).all() or score == "threshold"
    assert 1 <= sets.sum(1).mean() < 3


def test_too_few_cases_give_sets_of_all_classes():
    assert ConformalSets.fit([[0.9, 0.1]], [0], coverage=0.9).sets([[0.99, 0.01]]).all()


def test_intervals_by_hand():
    fitted = ConformalIntervals.fit([10, 12, 9, 20], [11, 10, 9, 15], coverage=0.6)  # errors 0 1 2 5; third of 4
    assert fitted.reach == 2
    low, high = fitted.intervals([7.0])
    assert (low.tolist(), high.tolist()) == ([5.0], [9.0])


def test_a_sum_that_rounds_above_one_is_one():
    """A quantile of 1 holds every class of every case."""
    rounded = [0.56, 0.34, 0.10]
    assert np.cumsum(rounded)[-1] > 1
    assert ConformalSets(1.0, "adaptive", 0.9).sets([rounded]).all()
