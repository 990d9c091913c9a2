"""Shamir's shares: any threshold of them give the secret, fewer do not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyclinic.federation.sums import masks

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
    made = masks.split_secret(secret, threshold, shares, lambda k: drawn * k + k)
    for count in {threshold, shares}:
        assert masks.combine_shares({place: made[place - 1] for place in places[:count]}) == secret


@given(sharings(), SECRETS)
def test_fewer_shares_fit_every_secret(sharing, other):
    """For any other secret there is a sharing with the same shares at these places, so they tell nothing."""
    secret, threshold, shares, places = sharing
    if threshold == 1:
        return
    made = masks.split_secret(secret, threshold, shares)
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
                above, below = above * (place - also) % masks.PRIME, below * (at - also) % masks.PRIME
        value += known * above * pow(below, -1, masks.PRIME)
    forged = (value % masks.PRIME).to_bytes(masks.SHARE_BYTES, "big")
    assert masks.combine_shares({**few, place: forged}) == other


def test_a_prime_just_above_32_bytes():
    assert all(pow(base, masks.PRIME - 1, masks.PRIME) == 1 for base in (2, 3, 5, 7, 11, 13))
    assert masks.PRIME > 2**256


@pytest.mark.parametrize("shares", [{}, {0: bytes(33)}, {1: b"\xff" * 33}, {1: (2**256).to_bytes(33, "big")}])
def test_what_is_no_share_gives_nothing(shares):
    assert masks.combine_shares(shares) is None


def test_shares_are_the_values_of_a_polynomial_with_as_many_coefficients_as_open_it():
    """The secret 5 with the coefficients 10 and 100: 5 + 10 x + 100 x^2. One coefficient less, and two shares open."""
    made = masks.split_secret((5).to_bytes(32, "big"), 3, 4, lambda k: 10**k)
    assert [int.from_bytes(share, "big") for share in made] == [115, 425, 935, 1645]
    assert [int.from_bytes(share, "big") for share in masks.split_secret((5).to_bytes(32, "big"), 1, 2)] == [5, 5]


def test_fewer_shares_than_open_a_secret_give_another_one():
    secret = (5).to_bytes(32, "big")
    made = masks.split_secret(secret, 3, 4, lambda k: 10**k)
    assert masks.combine_shares({place: made[place - 1] for place in (1, 3, 4)}) == secret
    for two in ((1, 2), (2, 4), (3, 4)):
        assert masks.combine_shares({place: made[place - 1] for place in two}) != secret


@pytest.mark.parametrize(("length", "threshold", "shares"), [(31, 2, 3), (33, 2, 3), (32, 0, 3), (32, 4, 3)])
def test_sharings_that_cannot_be(length, threshold, shares):
    with pytest.raises(AssertionError, match=r"a secret has 32 bytes|no more shares are needed than there are"):
        masks.split_secret(bytes(length), threshold, shares)
