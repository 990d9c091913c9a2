"""Fixed point: the stated resolution, the stated bound, and sums that do not depend on their order."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyclinic.federation.summing import fixed_point
from polyclinic.federation.summing.fixed_point import TooLarge, from_whole, limit, to_whole

NUMBERS = st.floats(-1000, 1000, width=32)
PARTS = st.lists(st.tuples(NUMBERS, st.integers(1, 10**5)), min_size=1, max_size=20)


@given(PARTS)
def test_the_mean_is_right_to_the_resolution(parts):
    rows = [to_whole(torch.tensor([x]), weight, 24) for x, weight in parts]
    total, weights = sum(rows[1:], rows[0].copy()), sum(weight for _, weight in parts)
    exact = sum(x * weight for x, weight in parts) / weights
    found = float(from_whole(total, weights, 24, torch.float64))
    assert abs(found - exact) <= len(parts) * 2**-24 / weights + 1e-12 * abs(exact)


@given(PARTS, st.randoms(use_true_random=False))
def test_the_order_does_not_matter(parts, rng):
    rows = [to_whole(torch.tensor([x]), weight, 24) for x, weight in parts]
    mixed = list(rows)
    rng.shuffle(mixed)
    assert sum(rows[1:], rows[0].copy()).tolist() == sum(mixed[1:], mixed[0].copy()).tolist()


@given(st.lists(st.integers(-(2**60), 2**60), min_size=1, max_size=7))
def test_whole_numbers_stay_exact_modulo_2_to_64(values):
    rows = [to_whole(torch.tensor([value]), 1, 24) for value in values]
    total = sum(rows[1:], rows[0].copy())
    assert int(total[0]) == sum(values) % 2**64


def test_the_largest_number_that_fits():
    most = limit(1000, 24)
    assert most == 2.0**53 / 1000 / 2**24
    to_whole(torch.tensor([most * 0.999], dtype=torch.float64), 1000, 24)
    with pytest.raises(TooLarge, match=r"with 1000 as weight ±5\.369e"):
        to_whole(torch.tensor([most * 1.001], dtype=torch.float64), 1000, 24)
    with pytest.raises(TooLarge):
        to_whole(torch.tensor([float("nan")]), 1, 24)


def test_the_sum_of_the_most_sites_does_not_overflow():
    row = to_whole(torch.tensor([limit(7, 24)], dtype=torch.float64), 7, 24)
    total = np.multiply(row, np.uint64(1023))
    assert float(from_whole(total, 7 * 1023, 24, torch.float64)) == limit(7, 24)
    assert fixed_point.LARGEST * 1023 < 2**63


def test_counters_are_rounded_like_in_a_float_mean():
    rows = [to_whole(torch.tensor(value), weight, 24) for value, weight in ((7, 3), (8, 5))]
    assert int(from_whole(rows[0] + rows[1], 8, 24, torch.int64)) == round((21 + 40) / 8)
