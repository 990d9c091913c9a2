"""Chances under exchange: urns by hand, and the level of the tests where nothing is to be found."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from polyclinic.metrics.statistics.significance import by_patient, chance_of_firsts, chance_of_order, chance_of_sum
from polyclinic.randomness import numpy_rng


def test_the_chance_of_a_sum_is_that_of_an_urn():
    """Three reconstructions that point to three images, two of them among 2 candidates of 10 images: by hand."""
    assert chance_of_sum([1, 1, 1], 2, 10, 2) == pytest.approx(3 / 45)
    assert chance_of_sum([3], 2, 10, 3) == pytest.approx(2 / 10)
    assert chance_of_sum([1, 1], 2, 10, 0) == 1


def test_the_chance_of_a_sum_counts_every_draw():
    weights = [5, 1, 1, 3, 2]
    draws = [sum(some) for some in combinations([*weights, 0, 0], 3)]
    for least in range(1, 12):
        assert chance_of_sum(weights, 3, 7, least) == pytest.approx(sum(one >= least for one in draws) / len(draws))


def test_the_tail_is_exact_far_below_a_thousandth():
    """No number of shuffles reaches this: all 40 of 40 that point, point to training images."""
    assert chance_of_sum([1] * 40, 150, 300, 40) == pytest.approx(1.46e-13, rel=0.01)


def test_the_order_is_that_of_the_rank_sum_test():
    from scipy import stats

    rng = numpy_rng("exchange", "order")
    above, below = rng.normal(0.8, 1, 12), rng.normal(0, 1, 30)
    exact = stats.mannwhitneyu(above, below, alternative="greater", method="exact").pvalue
    assert chance_of_order(above, below) == pytest.approx(exact, rel=1e-9)
    mirrored = stats.mannwhitneyu(below, above, alternative="greater", method="exact").pvalue
    assert chance_of_order(below, above) == pytest.approx(mirrored, rel=1e-9)


def test_many_images_take_the_normal_approximation():
    rng = numpy_rng("exchange", "many")
    above, below = rng.normal(0.2, 1, 400), rng.normal(0, 1, 300)
    assert 1e-6 < chance_of_order(above, below) < 0.2


def test_constant_scores_say_nothing():
    assert chance_of_order(np.zeros(5), np.zeros(9)) == pytest.approx(1)
    assert chance_of_order(np.zeros(0), np.zeros(9)) == 1


def test_a_patient_with_many_images_counts_once():
    """Ten images of one patient above all others are one case: by chance in one of four."""
    members, cases = np.full(10, 5.0), np.zeros(10)
    others = np.array([1.0, 2.0, 3.0])
    assert chance_of_order(members, others) < 0.005
    assert chance_of_order(members, others, cases, np.arange(3)) == pytest.approx(1 / 4)
    assert by_patient(np.array([1.0, 3.0, 5.0]), np.array([7, 7, 2])).tolist() == [5.0, 2.0]


def test_the_level_holds_where_nothing_is_to_be_found():
    """Of 2,000 draws of skewed scores, about 1 % are below 1 % (20 expected; 40 would be odd)."""
    rng = numpy_rng("exchange", "level")
    below = sum(chance_of_order(*np.split(rng.exponential(1, 24), 2)) <= 0.01 for _ in range(2000))
    assert below <= 40


def test_firsts_share_their_others():
    """One trial is one of 11; ten trials with one probability in common are first together far more often than 11^-3
    says, and never more often than one alone."""
    assert chance_of_firsts(1, 1, 10) == pytest.approx(1 / 11)
    assert chance_of_firsts(3, 3, 10) == pytest.approx(6 / (11 * 12 * 13))
    assert chance_of_firsts(0, 8, 10) == 1
