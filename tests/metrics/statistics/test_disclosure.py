"""Statistics that may leave a site: near the fine ones, wider and never narrower, and silent about few patients."""

import numpy as np
import pytest

from polyclinic.metrics.statistics import disclosure
from polyclinic.metrics.statistics.intervals import classification_metrics


def cases(count, seed=0):
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 2
    chance = np.clip(0.5 + 0.25 * (labels - 0.5) + 0.25 * rng.standard_normal(count), 0.01, 0.99)
    return np.stack([1 - chance, chance], 1), labels


def told(count, least):
    said, labels = cases(count)
    return disclosure.safe_intervals(classification_metrics(said, labels, said), count, None, least)


@pytest.mark.parametrize("count", [40, 200])
def test_coarse_intervals_hold_the_fine_ones_and_differ_by_a_few_patients(count):
    fine, coarse = told(count, 0), told(count, 5)
    assert fine.keys() == coarse.keys() >= {"accuracy", "auc", "brier"}
    for name in fine:
        assert coarse[name][1] <= fine[name][1] <= fine[name][2] <= coarse[name][2]
        for exact, rounded in zip(fine[name][:3], coarse[name][:3], strict=True):
            assert abs(exact - rounded) <= 2.5 / count + 1e-9
            assert round(rounded * 2000) == pytest.approx(rounded * 2000, abs=1e-6)


def test_nothing_is_told_of_few_patients_nor_of_bins_with_few_images():
    assert told(9, 0) == {}
    assert told(40, 41) == {}
    said, labels = cases(100)
    images, right = disclosure.calibration_counts(said, labels, 0)
    assert images.sum() == 100
    coarse, coarse_right = disclosure.calibration_counts(said, labels, 20)
    assert all(count == 0 or count >= 20 for count in coarse)
    assert (coarse_right <= coarse).all()
    assert (right <= images).all()


def test_bounds_of_one_patient_and_variances_of_sites_by_hand():
    """Four patients; one has half of the images, and all of class 1."""
    labels, patients = np.array([0, 0, 0, 1, 1, 1]), np.array([1, 2, 3, 4, 4, 4])
    bounds = disclosure.bounds_of_classes(labels, patients, classes=3)
    assert bounds == {"accuracy": 2, "calibration_error": 4, "auc": 4, "balanced_accuracy": 4, "brier": 4}
    assert disclosure.bounds_of_classes(labels, patients)["brier"] == 2
    assert disclosure.smallest_class(labels, patients) == 1
    value, low, high, variance = disclosure.mean_of_sites({"a": [0.8, 0, 0, 0.04], "b": [0.6, 0, 0, 0.12]})
    assert (value, variance) == (pytest.approx(0.7), pytest.approx(0.04))
    assert (low, high) == (pytest.approx(0.7 - 1.96 * 0.2, abs=1e-3), pytest.approx(0.7 + 1.96 * 0.2, abs=1e-3))


@pytest.mark.parametrize(("people", "told"), [
    ([range(1), range(1, 2), range(2, 14), range(14, 40)], [False, False, False, True]),  # two of one patient each
    ([range(6), range(6), range(6, 40), range(40, 90)], [False, False, False, True]),  # two of the same patients
    ([range(6), range(6, 12), range(12, 40)], [False, False, True]),  # twelve together are enough
    ([range(0), range(12), range(12, 40)], [True, True, True]),
    ([range(3), range(3, 8)], [False, False]),
])  # fmt: skip
def test_cells_of_few_patients_do_not_follow_from_the_others(people, told):
    cells = [np.array(some, dtype=np.int64) for some in people]
    assert disclosure.told_cells(cells, 10).tolist() == told
    assert disclosure.told_cells(cells, 0).all()


def test_what_is_hidden_in_drawn_tables_is_of_enough_patients():
    rng = np.random.default_rng(0)
    for _ in range(200):
        cells = [rng.choice(60, rng.integers(0, 25)) for _ in range(rng.integers(1, 7))]
        told = disclosure.told_cells(cells, 10)
        sizes = np.array([len(set(some.tolist())) for some in cells])
        hidden = set().union(*(cells[number].tolist() for number in np.flatnonzero(~told)))
        assert len(hidden) not in range(1, 10) or sizes[told].sum() == 0
        assert not set(sizes[told].tolist()) & set(range(1, 10))


@pytest.mark.parametrize("count", [10, 20, 40, 100, 250])
def test_of_two_models_that_differ_on_one_patient_the_change_of_accuracy_is_told_as_of_equal_ones(count):
    same = disclosure.rounded_interval((0.0, 0.0, 0.0), 2.0, count, 5, paired=True)
    for right in range(count):
        change = (right + 1) / count - right / count  # which floating-point numbers round up or down
        reach = 1.4 * change
        for sign in (1, -1):
            value = sign * change
            told = disclosure.rounded_interval((value, value - reach, value + reach), 2.0, count, 5, paired=True)
            assert told == pytest.approx(same), right
