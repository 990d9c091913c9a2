"""AUC against scikit-learn and by hand; its interval is tested with the membership attacks."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import roc_auc_score

from polyclinic.metrics.roc import auc, auc_interval, aucs_from_counts, share_interval


def test_auc_by_hand():
    # pairs: (1, 0) won, (1, 1) a tie, (2, 0) and (2, 1) won
    assert auc(np.array([1.0, 2.0]), np.array([0.0, 1.0])) == 3.5 / 4
    assert auc(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0])) == 1
    assert auc([0.5, 0.5], [0.5]) == 0.5
    assert math.isnan(auc([], [1.0]))
    assert math.isnan(auc([1.0], []))


@pytest.mark.parametrize("levels", [3, 1000])
def test_auc_is_scikit_learns_with_ties_and_without(levels: int):
    rng = np.random.default_rng(0)
    scores, truth = rng.integers(0, levels, 300), rng.integers(0, 2, 300)
    expected = roc_auc_score(truth, scores)
    assert auc(scores[truth == 1], scores[truth == 0]) == pytest.approx(expected, abs=1e-12)
    counts = [np.bincount(scores[truth == value], minlength=levels)[None] for value in (1, 0)]
    assert aucs_from_counts(*counts)[0] == pytest.approx(expected, abs=1e-12)
    assert auc_interval(scores[truth == 1], scores[truth == 0])[0] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("count", "total"), [(0, 1), (1, 1), (0, 30), (7, 30), (30, 30), (499, 20_000)])
def test_the_interval_of_a_share_is_scipys(count, total):
    known = stats.binomtest(count, total).proportion_ci(0.9, method="exact")
    assert share_interval(count, total, 0.9) == pytest.approx((known.low, known.high), abs=1e-9)
