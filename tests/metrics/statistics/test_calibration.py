"""Calibration, operating points and conformal sets against scikit-learn and arithmetic by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize
from sklearn.calibration import calibration_curve
from sklearn.metrics import roc_curve
from statsmodels.stats.proportion import proportion_confint

from polyclinic.metrics.statistics import (
    ConformalIntervals,
    ConformalSets,
    apply_temperature,
    calibration_error,
    conformal_quantile,
    fit_temperature,
    predictive_values,
    sensitivity_at_specificity,
)


def several(seed: int = 0, n: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """Logits of three classes, and labels drawn from their softmax at a temperature of 2."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (n, 3))
    return logits, np.array([rng.choice(3, p=row) for row in apply_temperature(logits, 2.0)])


def test_calibration_error_by_hand_and_with_scikit_learns_bins():
    # of the classes predicted: 0.8 right, 0.6 wrong; one bin says 1.4, comes 1
    assert calibration_error([[0.8, 0.2], [0.4, 0.6]], [0, 0], bins=1) == pytest.approx(0.4 / 2)
    # 0.6 and 0.7 share the third quarter and are both right: a gap of 0.7; 0.9 is wrong: 0.9
    said = [[0.6, 0.4], [0.3, 0.7], [0.9, 0.1]]
    assert calibration_error(said, [0, 1, 1], bins=4) == pytest.approx((0.7 + 0.9) / 3)
    assert calibration_error([1.0, 0.0, 1.0], [1, 0, 1]) == 0
    rng = np.random.default_rng(0)
    probabilities = rng.uniform(0.5, 1, size=400)
    right = (rng.uniform(size=400) < probabilities**2).astype(int)
    came, said = calibration_curve(right, probabilities, n_bins=10)
    counts = np.bincount((probabilities * 10).astype(int))[5:]
    expected = (np.abs(came - said) * counts).sum() / len(right)
    assert calibration_error(probabilities, right, bins=10) == pytest.approx(expected, abs=1e-12)


def test_temperature_scales_with_the_logits_where_the_slope_of_the_cross_entropy_is_zero():
    logits, labels = several()
    found = fit_temperature(logits, labels)
    assert found == pytest.approx(2, rel=0.25)  # labels were drawn at 2
    assert fit_temperature(logits * 3, labels) == pytest.approx(3 * found, rel=1e-5)
    assert fit_temperature(torch.tensor(logits) + 7, torch.tensor(labels)) == pytest.approx(found, rel=1e-5)
    # The slope by the inverse temperature: the mean logit that probabilities expect, minus that of the labels.
    logits, labels = several(1)
    own = logits[np.arange(len(labels)), labels].mean()
    slope = lambda inverse: (apply_temperature(logits, 1 / inverse) * logits).sum(1).mean() - own  # noqa: E731
    assert fit_temperature(logits, labels) == pytest.approx(1 / optimize.brentq(slope, 0.05, 5), rel=1e-6)


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


def test_operating_point_and_predictive_values_by_hand():
    found = sensitivity_at_specificity([0.9, 0.8, 0.35, 0.1, 0.2, 0.3, 0.4, 0.5], [1, 1, 1, 0, 0, 0, 0, 0], 0.8)
    assert found.threshold == 0.4
    assert (found.sensitivity.value, found.specificity.value) == (pytest.approx(2 / 3), 0.8)
    expected = proportion_confint(2, 3, method="beta")
    assert (found.sensitivity.low, found.sensitivity.high) == pytest.approx(expected, abs=1e-9)
    # of 1000 patients 100 are ill: 90 found and 10 missed; of 900 others 45 false alarms
    assert predictive_values(0.9, 0.95, 0.1) == pytest.approx((90 / 135, 855 / 865))
    assert predictive_values(0.5, 0.5, 0.3) == pytest.approx((0.3, 0.7))  # a coin tells nothing
    assert math.isnan(predictive_values(0.0, 1.0, 0.5)[0])


def test_quantile_and_intervals_by_hand():
    # of 9 scores: 0.9 * 10 = 9, the highest; of 8: 8.1, more than there are
    assert conformal_quantile(range(1, 10), 0.9) == 9
    assert conformal_quantile(range(1, 9), 0.9) == math.inf
    assert conformal_quantile([3, 1, 2], 0.5) == 2
    assert conformal_quantile(range(1, 20), 0.9) == 18
    fitted = ConformalIntervals.fit([10, 12, 9, 20], [11, 10, 9, 15], coverage=0.6)  # errors 0 1 2 5; third of 4
    assert fitted.reach == 2
    low, high = fitted.intervals([7.0])
    assert (low.tolist(), high.tolist()) == ([5.0], [9.0])


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
    assert ConformalSets.fit([[0.9, 0.1]], [0], coverage=0.9).sets([[0.99, 0.01]]).all()
    # A quantile of 1 holds every class of every case.
    rounded = [0.56, 0.34, 0.10]
    assert np.cumsum(rounded)[-1] > 1
    assert ConformalSets(1.0, "adaptive", 0.9).sets([rounded]).all()
