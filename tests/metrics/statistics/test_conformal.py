"""Conformal sets and intervals by hand; coverage counted on drawn cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyclinic.errors import BadInput
from polyclinic.metrics.statistics import ConformalIntervals, ConformalSets, apply_temperature, conformal_quantile


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


def test_what_cannot_be_fitted_is_refused():
    with pytest.raises(BadInput, match="coverage is 1"):
        conformal_quantile([1.0], 1)
    with pytest.raises(BadInput, match="no such conformal score: 'raps'"):
        ConformalSets.fit([[0.5, 0.5]], [0], score="raps")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="labels has 1 values for 2 cases"):
        ConformalIntervals.fit([1.0, 2.0], [1.0])


def test_a_sum_that_rounds_above_one_is_one():
    """A quantile of 1 holds every class of every case."""
    rounded = [0.56, 0.34, 0.10]
    assert np.cumsum(rounded)[-1] > 1
    assert ConformalSets(1.0, "adaptive", 0.9).sets([rounded]).all()
