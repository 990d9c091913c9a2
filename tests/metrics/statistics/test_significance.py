"""Tests between models against scipy, statsmodels and counts by hand; DeLong's variance against its definition."""

import itertools
from itertools import combinations

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score
from statsmodels.stats.contingency_tables import mcnemar as statsmodels_mcnemar
from statsmodels.stats.multitest import multipletests

from polyclinic.metrics import statistics
from polyclinic.metrics.statistics.significance import by_patient, chance_of_firsts, chance_of_order, chance_of_sum
from polyclinic.randomness import numpy_rng

OURS, THEIRS = [0.81, 0.84, 0.79, 0.86, 0.9], [0.8, 0.79, 0.81, 0.8, 0.83]


def test_paired_t_is_scipys_with_folds_and_equal_differences_by_hand():
    found, expected = statistics.paired_test(OURS, THEIRS), stats.ttest_rel(OURS, THEIRS)
    interval = expected.confidence_interval()
    assert found.p == pytest.approx(expected.pvalue, abs=1e-12)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), abs=1e-12)
    assert (found.difference, found.n) == (pytest.approx(0.034), 5)
    plain, folds = statistics.paired_test(OURS, THEIRS), statistics.paired_test(OURS, THEIRS, overlap=1 / 4)
    t = np.subtract(OURS, THEIRS).mean() / np.sqrt((1 / 5 + 1 / 4) * np.subtract(OURS, THEIRS).var(ddof=1))
    assert folds.p == pytest.approx(2 * stats.t.sf(t, 4))
    assert folds.p > plain.p
    assert statistics.paired_test([0.5, 0.6], [0.5, 0.6]).p == 1
    # both seeds better by 0.1: the sign test's two cases out of four
    assert statistics.paired_test([0.6, 0.7], [0.5, 0.6]).p == 0.5


def test_wilcoxon_is_scipys_and_with_ties_counts_all_changes_of_sign():
    rng = np.random.default_rng(0)
    ours, theirs = rng.normal(0.4, 1, 15), rng.normal(size=15)
    expected = stats.wilcoxon(ours, theirs, method="exact").pvalue
    assert statistics.paired_test(ours, theirs, test="wilcoxon").p == pytest.approx(expected, abs=1e-12)
    apart = np.array([1.0, 1, 2, 3, -1, 0])
    ranks = {1: 2.0, 2: 4.0, 3: 5.0}  # of |1 1 2 3 1|; the zero is left out
    observed = 2 + 2 + 4 + 5
    changes = itertools.product((0, 1), repeat=5)
    kept = [[abs(int(value)) for value, sign in zip(apart[:5], signs, strict=True) if sign] for signs in changes]
    sums = [sum(ranks[size] for size in sizes) for sizes in kept]
    expected = np.mean([abs(one - 7.5) >= observed - 7.5 for one in sums])
    assert statistics.paired_test(apart, np.zeros(6), test="wilcoxon").p == expected
    assert statistics.paired_test([1.0, 2], [1.0, 2], test="wilcoxon").p == 1
    many = np.random.default_rng(1).integers(-3, 5, 60).astype(float)
    approximate = stats.wilcoxon(many, method="asymptotic").pvalue
    assert statistics.paired_test(many, np.zeros(60), test="wilcoxon").p == pytest.approx(approximate, abs=1e-12)


@pytest.mark.parametrize("p", [[0.01, 0.04, 0.03], [0.5, 0.02], [0.2], [0.01, 0.01, 0.9, 0.004]])
def test_holm_is_statsmodels(p):
    assert statistics.holm(p) == pytest.approx(multipletests(p, method="holm")[1], abs=1e-12)
    assert statistics.holm([]) == []


@pytest.mark.parametrize(("only_ours", "only_theirs"), [(7, 1), (5, 5), (30, 12), (0, 3), (13, 12), (13, 13)])
def test_mcnemar_is_statsmodels(only_ours, only_theirs):
    table = [[20, only_ours], [only_theirs, 4]]
    pairs = np.repeat([(1, 1), (1, 0), (0, 1), (0, 0)], np.ravel(table), axis=0)
    expected = statsmodels_mcnemar(table, exact=only_ours + only_theirs <= 25).pvalue
    if (only_ours, only_theirs) == (13, 13):
        expected = 1.0  # statsmodels takes (|0| - 1)^2; R does not correct here, and neither do we
    assert statistics.mcnemar(*pairs.T) == pytest.approx(expected, abs=1e-12)
    assert statistics.mcnemar([1, 0, 1], [1, 0, 1]) == 1


def test_methods_against_a_baseline_are_paired_by_seed_and_corrected_together():
    lists = {"fedavg": THEIRS, "cwt": OURS, "feder": [0.9, 0.91, 0.89, 0.9, 0.95]}
    found = statistics.compare_with_baseline(
        {name: dict(enumerate(values)) for name, values in lists.items()}, "fedavg"
    )
    assert list(found) == ["cwt", "feder"]
    plain = [statistics.paired_test(lists[name], THEIRS).p for name in found]
    assert [one.p for one in found.values()] == plain
    assert [one.p_holm for one in found.values()] == statistics.holm(plain)
    assert statistics.compare_with_baseline({"fedavg": {0: 1.0}}, "fedavg") == {}
    baseline = {("seed", 1): 0.5, ("seed", 2): 0.7, ("seed", 3): 0.6}
    values = {"fedavg": baseline, "moon": {("seed", 1): 1.0}}
    values["cwt"] = {("seed", 3): 0.9, ("seed", 9): 0.1, ("seed", 1): 0.6}
    found = statistics.compare_with_baseline(values, "fedavg")
    assert found == {"cwt": statistics.paired_test([0.9, 0.6], [0.6, 0.5])}


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


def test_delongs_variance_by_hand_and_an_interval_that_holds_its_area():
    # positives 1 and 3 beat 1/2 and 2/2 of the negatives 0 and 2; negatives lie below 2/2 and 1/2 of the positives:
    # both variances are 1/8, so that the sum is 1/8 / 2 + 1/8 / 2
    assert statistics.delong_variance([1, 3, 0, 2], [1, 1, 0, 0]) == pytest.approx(1 / 8)
    assert statistics.delong_test([1, 3, 0, 2], [2, 6, 1, 5], [1, 1, 0, 0]).p == 1
    scores, _, truth = cases(2)
    found = statistics.delong_interval(scores, truth)
    assert found.value == pytest.approx(roc_auc_score(truth, scores), abs=1e-12)
    assert 0.5 < found.low < found.value < found.high < 1


def test_test_of_two_models_by_definition():
    first, second, truth = cases(0)
    covariance = slow_covariance([first, second], truth)
    found = statistics.delong_test(first, second, truth)
    difference = roc_auc_score(truth, first) - roc_auc_score(truth, second)
    z = difference / np.sqrt(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1])
    assert statistics.delong_variance(first, truth) == pytest.approx(covariance[0, 0], abs=1e-14)
    assert found.difference == pytest.approx(difference, abs=1e-12)
    assert found.p == pytest.approx(2 * stats.norm.sf(abs(z)), abs=1e-10)
    assert found.low == pytest.approx(difference - 1.959964 * difference / z, abs=1e-6)


def test_the_chance_of_a_sum_is_that_of_an_urn_counts_every_draw_and_is_exact():
    """Three reconstructions that point to three images, two of them among 2 candidates of 10 images: by hand."""
    assert chance_of_sum([1, 1, 1], 2, 10, 2) == pytest.approx(3 / 45)
    assert chance_of_sum([3], 2, 10, 3) == pytest.approx(2 / 10)
    assert chance_of_sum([1, 1], 2, 10, 0) == 1
    weights = [5, 1, 1, 3, 2]
    draws = [sum(some) for some in combinations([*weights, 0, 0], 3)]
    for least in range(1, 12):
        assert chance_of_sum(weights, 3, 7, least) == pytest.approx(sum(one >= least for one in draws) / len(draws))
    # No number of shuffles reaches this: all 40 of 40 that point, point to training images.
    assert chance_of_sum([1] * 40, 150, 300, 40) == pytest.approx(1.46e-13, rel=0.01)


def test_the_order_is_that_of_the_rank_sum_test_and_constant_scores_say_nothing():
    from scipy import stats

    rng = numpy_rng("exchange", "order")
    above, below = rng.normal(0.8, 1, 12), rng.normal(0, 1, 30)
    exact = stats.mannwhitneyu(above, below, alternative="greater", method="exact").pvalue
    assert chance_of_order(above, below) == pytest.approx(exact, rel=1e-9)
    mirrored = stats.mannwhitneyu(below, above, alternative="greater", method="exact").pvalue
    assert chance_of_order(below, above) == pytest.approx(mirrored, rel=1e-9)
    assert chance_of_order(np.zeros(5), np.zeros(9)) == pytest.approx(1)
    assert chance_of_order(np.zeros(0), np.zeros(9)) == 1


def test_a_patient_with_many_images_counts_once_and_firsts_share_their_others():
    """Ten images of one patient above all others are one case: by chance in one of four."""
    members, cases = np.full(10, 5.0), np.zeros(10)
    others = np.array([1.0, 2.0, 3.0])
    assert chance_of_order(members, others) < 0.005
    assert chance_of_order(members, others, cases, np.arange(3)) == pytest.approx(1 / 4)
    assert by_patient(np.array([1.0, 3.0, 5.0]), np.array([7, 7, 2])).tolist() == [5.0, 2.0]
    # One trial is one of 11; ten trials with one probability in common are first together far more often than 11^-3
    # says, and never more often than one alone.
    assert chance_of_firsts(1, 1, 10) == pytest.approx(1 / 11)
    assert chance_of_firsts(3, 3, 10) == pytest.approx(6 / (11 * 12 * 13))
    assert chance_of_firsts(0, 8, 10) == 1
