"""DeLong's variance against its definition and scipy's Brunner-Munzel test, which has the same one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import roc_auc_score

from polyclinic.errors import BadInput
from polyclinic.metrics.statistics import delong_interval, delong_test, delong_variance


def cases(seed: int, levels: int = 12, n: int = 60) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tied scores of two models and the truth."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, 2, n)
    first = rng.integers(0, levels, n) + 4 * truth
    return first, first + rng.integers(0, levels, n), truth


def slow_covariance(models: list[np.ndarray], truth: np.ndarray) -> np.ndarray:
    """DeLong et al. 1988 as defined: from the comparison of every positive with every negative case."""
    wins = [(m[truth == 1][:, None] > m[truth == 0]) + 0.5 * (m[truth == 1][:, None] == m[truth == 0]) for m in models]
    of_positives, of_negatives = (np.stack([w.mean(axis) for w in wins]) for axis in (1, 0))
    return np.cov(of_positives) / of_positives.shape[1] + np.cov(of_negatives) / of_negatives.shape[1]


def test_variance_by_hand():
    # positives 1 and 3 beat 1/2 and 2/2 of the negatives 0 and 2; negatives lie below 2/2 and 1/2 of the positives:
    # both variances are 1/8, so that the sum is 1/8 / 2 + 1/8 / 2
    assert delong_variance([1, 3, 0, 2], [1, 1, 0, 0]) == pytest.approx(1 / 8)


def test_test_of_two_models_by_definition():
    first, second, truth = cases(0)
    covariance = slow_covariance([first, second], truth)
    found = delong_test(first, second, truth)
    difference = roc_auc_score(truth, first) - roc_auc_score(truth, second)
    z = difference / np.sqrt(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1])
    assert delong_variance(first, truth) == pytest.approx(covariance[0, 0], abs=1e-14)
    assert found.difference == pytest.approx(difference, abs=1e-12)
    assert found.p == pytest.approx(2 * stats.norm.sf(abs(z)), abs=1e-10)
    assert found.low == pytest.approx(difference - 1.959964 * difference / z, abs=1e-6)


def test_variance_is_that_of_brunner_and_munzel():
    scores, _, truth = cases(1)
    expected = stats.brunnermunzel(scores[truth == 0], scores[truth == 1]).statistic
    ours = (roc_auc_score(truth, scores) - 0.5) / np.sqrt(delong_variance(scores, truth))
    assert ours == pytest.approx(expected, abs=1e-9)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000))
def test_only_ranks_matter_and_sides_can_be_exchanged(seed):
    first, second, truth = cases(seed)
    one, other = delong_test(first, second, truth), delong_test(np.exp(second / 4), first**3, truth)
    assert other.difference == pytest.approx(-one.difference, abs=1e-12)
    assert other.p == pytest.approx(one.p, abs=1e-9)


def test_models_alike_and_models_apart():
    assert delong_test([1, 3, 0, 2], [2, 6, 1, 5], [1, 1, 0, 0]).p == 1
    with pytest.raises(BadInput, match="McNemar"):
        delong_test([3, 4, 1, 2], [1, 2, 3, 4], [1, 1, 0, 0])
    with pytest.raises(BadInput, match="two positive and two negative"):
        delong_variance([1, 2, 3], [1, 1, 0])


def test_interval_holds_its_area():
    scores, _, truth = cases(2)
    found = delong_interval(scores, truth)
    assert found.value == pytest.approx(roc_auc_score(truth, scores), abs=1e-12)
    assert 0.5 < found.low < found.value < found.high < 1
