"""Calibration error, Brier score and temperature against scikit-learn and arithmetic by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss, log_loss

from polyclinic.errors import BadInput
from polyclinic.metrics.statistics import (
    apply_temperature,
    brier_parts,
    brier_score,
    calibration_error,
    fit_temperature,
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


def test_temperature_is_the_lowest_of_a_grid_and_scales_with_the_logits():
    logits, labels = several()
    found = fit_temperature(logits, labels)
    grid = np.exp(np.linspace(-2, 2, 81))
    losses = [log_loss(labels, apply_temperature(logits, t), labels=[0, 1, 2]) for t in grid]
    assert found == pytest.approx(grid[np.argmin(losses)], rel=0.026)
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


def test_what_are_no_probabilities_is_refused():
    with pytest.raises(BadInput, match="add up to 1"):
        brier_score([[0.5, 0.6]], [0])
    with pytest.raises(BadInput, match="0 or more"):
        brier_score([1.2], [0])
    with pytest.raises(BadInput, match="whole numbers from 0 to 1"):
        brier_score([0.5], [2])
    with pytest.raises(BadInput, match="no such binning: 'wide'"):
        calibration_error([0.5], [1], binning="wide")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="finite numbers"):
        fit_temperature([[float("nan"), 1.0]], [0])
    with pytest.raises(BadInput, match="temperature is 0"):
        apply_temperature([[1.0, 2.0]], 0)
