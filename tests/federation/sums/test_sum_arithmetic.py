"""The arithmetic of sums: whole numbers, Shamir's shares, and the least that a site accepts of a secure sum."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyclinic.federation.call import GateRefused
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.policy import Policy
from polyclinic.federation.sums import arithmetic
from polyclinic.federation.sums.settings import Federated, Floor, floor_of

LAYOUT = [["gradients", "g", "float32", [1]]]
NUMBERS = st.floats(-1000, 1000, width=32)
PARTS = st.lists(st.tuples(NUMBERS, st.integers(1, 10**5)), min_size=1, max_size=20)


def to_whole(values, weight, bits):
    row = np.empty(values.numel(), np.uint64)
    arithmetic.write_whole(values, weight, bits, row)
    return row


@given(PARTS)
def test_the_mean_is_right_to_the_resolution(parts):
    rows = [to_whole(torch.tensor([x]), weight, 24) for x, weight in parts]
    total, weights = sum(rows[1:], rows[0].copy()), sum(weight for _, weight in parts)
    exact = sum(x * weight for x, weight in parts) / weights
    found = float(arithmetic.from_whole(total, weights, 24, torch.float64))
    assert abs(found - exact) <= len(parts) * 2**-24 / weights + 1e-12 * abs(exact)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(1, 10**9))
def test_a_whole_number_is_exact_or_refused(value, weight):
    """Also with weight 1, and the smallest number of 64 bits, which has no opposite."""
    if abs(value) * weight <= arithmetic.LARGEST:
        assert int(to_whole(torch.tensor([value, 0]), weight, 24).view(np.int64)[0]) == value * weight
    else:
        with pytest.raises(arithmetic.TooLarge, match=f"with {weight} as weight"):
            to_whole(torch.tensor([value, 0]), weight, 24)


@given(st.floats(0, 1e12), st.integers(8, 40))
def test_a_count_of_images_fits_or_is_refused(images, bits):
    """Up to 500 million images at a site, whatever the resolution; the sum of the most sites does not wrap around."""
    parcel = Parcel("gradients", {"g": torch.zeros(1)}, {"samples": 1, "expected": images})
    fits = images <= 2.0 ** (53 - min(bits, arithmetic.COUNT_BITS))
    assert fits or images > 5e8
    if not fits:
        with pytest.raises(arithmetic.TooLarge, match="the number of images is"):
            arithmetic.row_of([parcel], mean=True, weighting="samples", bits=bits)
        return
    row = arithmetic.row_of([parcel], mean=True, weighting="samples", bits=bits)[0]
    [total] = arithmetic.parcels_of(row * np.uint64(1023), LAYOUT, ["gradients"], mean=True, bits=bits, sites=1023)
    assert total.metadata["expected"] == pytest.approx(
        1023 * images, abs=1023 * 2.0 ** -min(bits, arithmetic.COUNT_BITS)
    )


SECRETS = st.binary(min_size=32, max_size=32)


@st.composite
def sharings(draw):
    shares = draw(st.integers(1, 12))
    threshold = draw(st.integers(1, shares))
    places = draw(st.permutations(range(1, shares + 1)))
    return draw(SECRETS), threshold, shares, places


@given(sharings(), st.integers(0, 2**250))
def test_any_threshold_of_shares_gives_the_secret_back(sharing, drawn):
    secret, threshold, shares, places = sharing
    made = arithmetic.split_secret(secret, threshold, shares, lambda k: drawn * k + k)
    for count in {threshold, shares}:
        assert arithmetic.combine_shares({place: made[place - 1] for place in places[:count]}) == secret


@given(sharings(), SECRETS)
def test_fewer_shares_fit_every_secret(sharing, other):
    """For any other secret there is a sharing with the same shares at these places, so they tell nothing."""
    secret, threshold, shares, places = sharing
    if threshold == 1:
        return
    made = arithmetic.split_secret(secret, threshold, shares)
    few = {place: made[place - 1] for place in places[: threshold - 1]}
    # the polynomial through these shares and the other secret at 0: its value at one more place is a proper share
    with_other = {place: int.from_bytes(share, "big") for place, share in few.items()} | {
        0: int.from_bytes(other, "big")
    }
    place = places[threshold - 1]
    value = 0
    for at, known in with_other.items():
        above = below = 1
        for also in with_other:
            if also != at:
                above, below = above * (place - also) % arithmetic.PRIME, below * (at - also) % arithmetic.PRIME
        value += known * above * pow(below, -1, arithmetic.PRIME)
    forged = (value % arithmetic.PRIME).to_bytes(arithmetic.SHARE_BYTES, "big")
    assert arithmetic.combine_shares({**few, place: forged}) == other


@pytest.mark.parametrize("shares", [{}, {0: bytes(33)}, {1: b"\xff" * 33}, {1: (2**256).to_bytes(33, "big")}])
def test_what_is_no_share_gives_nothing(shares):
    assert arithmetic.combine_shares(shares) is None


def test_shares_are_the_values_of_a_polynomial_with_as_many_coefficients_as_open_it():
    """The secret 5 with the coefficients 10 and 100: 5 + 10 x + 100 x^2. One coefficient less, and two shares open."""
    made = arithmetic.split_secret((5).to_bytes(32, "big"), 3, 4, lambda k: 10**k)
    assert [int.from_bytes(share, "big") for share in made] == [115, 425, 935, 1645]
    assert [int.from_bytes(share, "big") for share in arithmetic.split_secret((5).to_bytes(32, "big"), 1, 2)] == [5, 5]


USUAL = Federated(sum="secure")


def test_the_default_follows_the_pinned_keys_and_refuses_liars():
    """More than half of the pinned sites, and a sixth of them may lie; in a simulation nothing is pinned."""
    found = {pinned: floor_of(Policy(), pinned) for pinned in (0, 2, 3, 5, 9, 12, 32)}
    assert [floor.min_sites for floor in found.values()] == [3, 3, 3, 3, 5, 7, 17]
    assert [floor.liars for floor in found.values()] == [0, 1, 1, 1, 1, 2, 5]
    assert floor_of(Policy(min_sites=4, liars=0), 32) == Floor(4, 0)
    # Nine pinned sites; the coordinator brings two that work for it, which was enough before.
    with pytest.raises(GateRefused, match=r"wants 5 or more \(min_sites\)"):
        floor_of(Policy(), 9).threshold(USUAL, 3)


@pytest.mark.parametrize("pinned", range(3, 40))
def test_the_default_takes_every_sum_of_enough_sites_with_the_default_threshold(pinned):
    floor = floor_of(Policy(), pinned)
    for sites in range(floor.min_sites, pinned + 1):
        assert floor.min_sites <= floor.threshold(USUAL, sites) <= sites


@pytest.mark.parametrize(("sites", "threshold", "liars"), [(9, 0.5, 1), (12, 2 / 3, 6), (5, 2 / 3, 4), (4, 0.5, 2)])
def test_a_threshold_that_does_not_protect_is_refused_with_the_cure(sites, threshold, liars):
    with pytest.raises(GateRefused, match=r"raise federation\.threshold, or take more sites"):
        Floor(3, liars).threshold(Federated(sum="secure", threshold=threshold), sites)


def openings(sites, liars, common, own):
    """Whether the coordinator and the last `liars` sites can open site 0, with all they may try: each honest site signs
    one set of at least as many sites as it wants, with itself in it, and gives its shares for that one if enough sites
    signed it. Site 0 wants `own`, the other honest ones `common`."""
    honest = range(sites - liars)
    sets = [set(some) for size in range(common, sites + 1) for some in itertools.combinations(range(sites), size)]
    for first, second in itertools.product(sets, repeat=2):
        # honest sites sign the one or the other; all those that may do both are free to be told either
        one, other = ({site for site in honest if site in some} for some in (first, second))
        if 0 not in one or len(first) < own:
            continue
        both = one & other
        if first == second:
            if one == {0} and len(one) + liars >= own:
                return True
            continue
        for told in range(len(both) + 1):
            signs_first, signs_second = len(one - both) + len(both) - told, len(other - both) + told
            if signs_first + liars >= own and signs_second + liars >= common:
                return True  # two sets are agreed on: 0 in one, and its pairs in the other
    return False


@pytest.mark.parametrize("sites", [3, 4, 5, 6])
@pytest.mark.parametrize("threshold", [0.5, 0.6, 2 / 3, 0.8])
def test_what_is_accepted_cannot_be_opened(sites, threshold):
    """All lies that the coordinator may tell, tried one by one, for every number of liars."""
    settings = Federated(sum="secure", threshold=threshold)
    common = max(settings.fewest_of(sites), 3)
    for liars in range(sites):
        floor = Floor(3, liars)
        try:
            own = floor.threshold(settings, sites)
        except GateRefused:
            continue
        assert not openings(sites, liars, common, own)


def whole_row(numbers, weight=2, expected=0, sites=2):
    return np.array([*numbers, weight, expected, sites], dtype=np.int64).view(np.uint64)


def test_what_a_sum_says_by_hand():
    """Whole numbers of two bits: 6 and 8 are 1.5 and 2; of two images they are a mean of 0.75 and 1."""
    layout = [["weights", "w", "float32", [2]]]
    [mean] = arithmetic.parcels_of(whole_row([6, 8], expected=12), layout, ["weights"], mean=True, bits=2, sites=2)
    assert mean.tensors["w"].tolist() == [0.75, 1.0]
    assert mean.metadata == {"samples": 2, "expected": 3.0, "sites": 2}
    [total] = arithmetic.parcels_of(whole_row([6, 8], weight=1), layout, ["weights"], mean=False, bits=2, sites=2)
    assert total.tensors["w"].tolist() == [1.5, 2.0]
    for wrong in (whole_row([6, 8], weight=0), whole_row([6, 8], sites=3)):
        with pytest.raises(ParcelRejected, match="masks do not cancel"):
            arithmetic.parcels_of(wrong, layout, ["weights"], mean=False, bits=2, sites=2)
    row = torch.tensor([2**53, -(2**53), 3, 0, 1])
    arithmetic.check_open(row)
    arithmetic.check_open(torch.tensor([5, -5, 0, 0, 1]))  # a site without images
    for place, wrong in ((0, 2**53 + 1), (1, -(2**53) - 1), (2, -1), (3, -1), (4, 2), (4, 0)):
        changed = row.clone()
        changed[place] = wrong
        with pytest.raises(ParcelRejected, match="does not count as one site"):
            arithmetic.check_open(changed)


@pytest.mark.parametrize("entry", [
    *("weights", ["weights", "w", "float32"], ["labels", "w", "float32", [2]], ["weights", 7, "float32", [2]]),
    *(["weights", "w", "save", [2]], ["weights", "w", 7, [2]], ["weights", "w", "float32", 2]),
    *(["weights", "w", "float32", [-1]], ["weights", "w", "float32", [True]], ["weights", "w", "float32", [2.0]]),
])  # fmt: skip
def test_a_layout_that_says_something_else_is_refused(entry):
    numbers = torch.zeros(5, dtype=torch.int64)
    arithmetic.check_layout([["weights", "w", "float32", [2]]], numbers, ["weights"])
    with pytest.raises(ParcelRejected, match="no list of kinds, names, dtypes and shapes"):
        arithmetic.check_layout([entry], numbers, ["weights"])


@pytest.mark.parametrize(("weight", "mean"), [(1, 12), (2, 6), (3, 4), (8, 2)])
def test_means_of_whole_numbers(weight, mean):
    assert int(arithmetic.from_whole(np.array([12], dtype=np.uint64), weight, 24, torch.int64)) == mean
