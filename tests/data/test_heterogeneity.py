"""The Kolmogorov-Smirnov statistic between sites, against arithmetic done by hand."""

import numpy as np
import pytest
from scipy.stats import ks_2samp

from polyclinic.data.labels import label_histograms, mean_ks, pairwise_ks


def test_two_classes_differ_by_their_shares():
    sites = {"a": np.array([0, 0, 0, 1]), "b": np.array([0, 1, 1, 1]), "c": np.array([0, 0, 1, 1])}
    expected = [[0, 0.5, 0.25], [0.5, 0, 0.25], [0.25, 0.25, 0]]
    np.testing.assert_allclose(pairwise_ks(sites), expected)
    assert mean_ks(sites) == pytest.approx((0.5 + 0.25 + 0.25) / 3)


def test_ages_that_do_not_overlap_differ_by_one():
    assert mean_ks({"young": np.array([1.0, 2.0]), "old": np.array([3.0, 9.0])}) == 1


def test_the_largest_gap_counts():
    # cumulative shares at 1, 2, 3, 4: 1/2, 1/2, 1, 1 against 0, 1/2, 1/2, 1
    assert mean_ks({"a": np.array([1.0, 3.0]), "b": np.array([2.0, 4.0])}) == 0.5


def test_equal_sites_do_not_differ():
    assert mean_ks({"a": np.array([0, 1, 2]), "b": np.array([2, 1, 0])}) == 0


@pytest.mark.parametrize("rounding", [0, 1])
def test_scipy_agrees(rounding):
    rng = np.random.default_rng(0)
    sites = {str(k): rng.normal(k / 2, 1 + k, 50 + 7 * k).round(rounding) for k in range(4)}
    for i, one in enumerate(sites.values()):
        for j, other in enumerate(sites.values()):
            assert pairwise_ks(sites)[i, j] == pytest.approx(ks_2samp(one, other).statistic)


def test_one_site_alone_differs_from_nobody():
    assert mean_ks({"only": np.array([0, 1])}) == 0


def test_histograms_count_classes_or_values_between_edges():
    assert label_histograms({"a": np.array([0, 2, 2]), "b": np.array([1])}, 3) == {
        "edges": None,
        "per_site": {"a": [1, 0, 2], "b": [0, 1, 0]},
    }
    found = label_histograms({"a": np.array([0.0, 24.0]), "b": np.array([1.5])}, 0)
    assert found["edges"] == pytest.approx(list(range(25)))
    assert found["per_site"]["a"] == [1, *[0] * 22, 1]
    assert found["per_site"]["b"] == [0, 1, *[0] * 22]
