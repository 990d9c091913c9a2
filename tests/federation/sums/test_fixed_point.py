"""Fixed point: the stated resolution, the stated bound, and sums that do not depend on their order."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.sums import rows as fixed_point
from polyclinic.federation.sums.rows import COUNT_BITS, TooLarge, from_whole, limit, parcels_of, summand_of, write_whole

LAYOUT = [["gradients", "g", "float32", [1]]]
NUMBERS = st.floats(-1000, 1000, width=32)
PARTS = st.lists(st.tuples(NUMBERS, st.integers(1, 10**5)), min_size=1, max_size=20)


def to_whole(values, weight, bits):
    row = np.empty(values.numel(), np.uint64)
    write_whole(values, weight, bits, row)
    return row


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


@given(st.lists(st.integers(-(2**53), 2**53), min_size=1, max_size=7))
def test_whole_numbers_stay_exact(values):
    rows = [to_whole(torch.tensor([value]), 1, 24) for value in values]
    total = sum(rows[1:], rows[0].copy())
    assert int(total.view(np.int64)[0]) == sum(values)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(1, 10**9))
def test_a_whole_number_is_exact_or_refused(value, weight):
    """Also with weight 1, and the smallest number of 64 bits, which has no opposite."""
    if abs(value) * weight <= fixed_point.LARGEST:
        assert int(to_whole(torch.tensor([value, 0]), weight, 24).view(np.int64)[0]) == value * weight
    else:
        with pytest.raises(TooLarge, match=f"with {weight} as weight"):
            to_whole(torch.tensor([value, 0]), weight, 24)


@given(st.floats(0, 1e12), st.integers(8, 40))
def test_a_count_of_images_fits_or_is_refused(images, bits):
    """Up to 500 million images at a site, whatever the resolution; the sum of the most sites does not wrap around."""
    parcel = Parcel("gradients", {"g": torch.zeros(1)}, {"samples": 1, "expected": images})
    fits = images <= 2.0 ** (53 - min(bits, COUNT_BITS))
    assert fits or images > 5e8
    if not fits:
        with pytest.raises(TooLarge, match="the number of images is"):
            summand_of([parcel], mean=True, weighting="samples", bits=bits)
        return
    row = summand_of([parcel], mean=True, weighting="samples", bits=bits).numbers
    [total] = parcels_of(row * np.uint64(1023), LAYOUT, ["gradients"], mean=True, bits=bits, sites=1023)
    assert total.metadata["expected"] == pytest.approx(1023 * images, abs=1023 * 2.0 ** -min(bits, COUNT_BITS))


@given(st.integers(1, 10**18))
def test_a_weight_fits_or_is_refused(samples):
    parcel = Parcel("weights", {"w": torch.zeros(1)}, {"samples": samples})
    if samples <= fixed_point.LARGEST:
        assert summand_of([parcel], mean=True, weighting="samples", bits=8).numbers[-3] == samples
    else:
        with pytest.raises(TooLarge, match="the number of images is"):
            summand_of([parcel], mean=True, weighting="samples", bits=8)


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
