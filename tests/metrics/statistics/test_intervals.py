"""Intervals against scipy and statsmodels; whole patients are drawn. Agreement against Bland and Altman (1986)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.weightstats import DescrStatsW

from polyclinic.metrics.roc import auc
from polyclinic.metrics.statistics import bland_altman, bootstrap_interval, bootstrap_intervals, mean_interval
from polyclinic.metrics.statistics.intervals import rows_by_patient
from polyclinic.randomness import numpy_rng

ADDRESS = ("test", 3)
finite = st.floats(-100, 100).map(lambda value: round(value, 3))


def test_mean_interval_is_statsmodels_and_by_hand():
    values = [0.81, 0.84, 0.79, 0.86]
    found = mean_interval(values, confidence=0.9)
    assert (found.low, found.high) == pytest.approx(DescrStatsW(values).tconfint_mean(0.1), abs=1e-12)
    # two values, 0 and 2: mean 1, standard error 1, t(0.975, 1) = 12.7062
    assert mean_interval([0, 2]).high == pytest.approx(13.7062, abs=1e-4)
    assert str(mean_interval([0, 2])) == "1.000 [-11.706, 13.706]"


def test_overlapping_folds_widen_the_interval():
    plain, folds = mean_interval([0, 1, 2, 3, 4]), mean_interval([0, 1, 2, 3, 4], overlap=1 / 4)
    assert (folds.high - 2) / (plain.high - 2) == pytest.approx(((1 / 5 + 1 / 4) * 5) ** 0.5)


@pytest.mark.parametrize("kind", ["bca", "percentile"])
def test_bootstrap_of_independent_cases_is_scipys(kind):
    values = np.random.default_rng(0).exponential(size=25)
    ours = bootstrap_interval(
        lambda rows: values[rows].mean(), 25, address=ADDRESS, draws=400, kind=kind, confidence=0.9
    )
    theirs = stats.bootstrap(
        (values,), np.mean, n_resamples=400, confidence_level=0.9, method=kind, rng=numpy_rng(*ADDRESS)
    ).confidence_interval
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_an_address_names_the_draws():
    values = np.arange(10.0)
    first, again, other = (
        bootstrap_interval(lambda rows: values[rows].mean(), 10, address=(seed,), draws=50) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_all_images_of_a_patient_are_drawn_together():
    patients = ["b", "a", "b", "c", "a", "a"]
    seen: list[np.ndarray] = []
    bootstrap_interval(lambda rows: float(seen.append(rows) or len(rows)), 6, patients=patients, draws=30)
    for rows in seen:
        times = np.bincount(rows, minlength=6)
        assert times[0] == times[2]
        assert times[1] == times[4] == times[5]
    assert [group.tolist() for group in rows_by_patient(patients, 6)] == [[0, 2], [1, 4, 5], [3]]


def test_copies_of_each_case_narrow_the_interval_unless_drawn_by_patient():
    values = np.random.default_rng(1).normal(size=20)
    copied, patients = np.tile(values, 4), np.tile(np.arange(20), 4)
    options = {"address": ADDRESS, "draws": 300}
    once = bootstrap_interval(lambda rows: values[rows].mean(), 20, **options)
    by_patient = bootstrap_interval(lambda rows: copied[rows].mean(), 80, patients=patients, **options)
    by_image = bootstrap_interval(lambda rows: copied[rows].mean(), 80, **options)
    assert (by_patient.low, by_patient.high) == pytest.approx((once.low, once.high), abs=1e-12)
    assert by_image.high - by_image.low < 0.7 * (once.high - once.low)


def test_draws_without_positive_cases_do_not_count():
    scores, truth = np.array([0.9, 0.8, 0.3, 0.2, 0.85]), np.array([1, 1, 0, 0, 0])

    def metrics(rows):
        found = scores[rows], truth[rows]
        return {"auc": auc(found[0][found[1] == 1], found[0][found[1] == 0]), "never": float("nan")}

    found = bootstrap_intervals(metrics, 5, draws=200, kind="percentile")
    assert list(found) == ["auc"]
    assert 0 <= found["auc"].low <= found["auc"].value <= found["auc"].high <= 1


@settings(max_examples=15, deadline=None)
@given(st.lists(finite, min_size=3, max_size=8), st.floats(0.5, 4), finite)
def test_a_bootstrap_moves_and_scales_with_its_values(values, scale, shift):
    plain, moved = np.array(values), np.array(values) * scale + shift
    one, two = (
        bootstrap_interval(lambda rows, v=v: v[rows].mean(), len(v), draws=40, kind="percentile")
        for v in (plain, moved)
    )
    assert (two.low, two.high) == pytest.approx((one.low * scale + shift, one.high * scale + shift), abs=1e-6)


WRIGHT = [494, 395, 516, 434, 476, 557, 413, 442, 650, 433, 417, 656, 267, 478, 178, 423, 427]
MINI = [512, 430, 520, 428, 500, 600, 364, 380, 658, 445, 432, 626, 260, 477, 259, 350, 451]


def test_published_example():
    found = bland_altman(WRIGHT, MINI)
    assert (found.bias.value, found.deviation, found.n) == (
        pytest.approx(-2.1, abs=0.05),
        pytest.approx(38.8, abs=0.05),
        17,
    )
    assert (found.bias.low, found.bias.high) == (pytest.approx(-22.0, abs=0.1), pytest.approx(17.8, abs=0.1))
    # the paper takes 2 standard deviations: -79.7 and 75.5
    assert found.lower.value == pytest.approx(-79.7 + 0.04 * 38.8, abs=0.1)
    assert found.upper.value == pytest.approx(75.5 - 0.04 * 38.8, abs=0.1)
    # and 3 s^2 / n for the variance of a limit, a reach of 34.6; with the formula of 1999 it is 34.8
    assert found.upper.high - found.upper.value == pytest.approx(34.8, abs=0.1)
    assert found.lower.value - found.lower.low == pytest.approx(34.8, abs=0.1)


def test_sides_exchanged():
    one, other = bland_altman(WRIGHT, MINI), bland_altman(MINI, WRIGHT)
    assert (other.bias.value, other.lower.value) == (pytest.approx(-one.bias.value), pytest.approx(-one.upper.value))
    assert other.lower.low == pytest.approx(-one.upper.high)
