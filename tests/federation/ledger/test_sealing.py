"""Boxes open for one key, about one thing, and in no other way."""

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from polyclinic.federation.ledger.keys import OVERHEAD, SealBroken, open_box, public_key, seal_box

ANNA, BEN, EVE = (X25519PrivateKey.generate() for _ in range(3))
ABOUT = {"from": "anna", "to": "ben", "round": 4}


def from_anna_to_ben(plain=b"model"):
    return seal_box(plain, ABOUT, sender=ANNA, recipient=public_key(BEN))


@settings(max_examples=25, deadline=None)
@given(st.binary(max_size=300))
def test_what_is_sealed_comes_out_and_cannot_be_seen(plain):
    box = from_anna_to_ben(plain)
    assert len(box) == len(plain) + OVERHEAD
    assert len(plain) < 8 or plain not in box
    assert open_box(box, ABOUT, recipient=BEN, sender=public_key(ANNA)) == plain


def test_the_same_bytes_never_make_the_same_box():
    assert from_anna_to_ben() != from_anna_to_ben()


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_changed_bit_is_noticed(data):
    box = bytearray(from_anna_to_ben())
    box[data.draw(st.integers(0, len(box) - 1))] ^= 1 << data.draw(st.integers(0, 6))
    with pytest.raises(SealBroken):
        open_box(bytes(box), ABOUT, recipient=BEN, sender=public_key(ANNA))


@pytest.mark.parametrize("length", [0, 1, 31, 32, 47])
def test_a_box_cut_short_is_noticed(length):
    with pytest.raises(SealBroken):
        open_box(from_anna_to_ben()[:length], ABOUT, recipient=BEN, sender=public_key(ANNA))


@pytest.mark.parametrize("about", [{**ABOUT, "round": 5}, {**ABOUT, "to": "eve"}, {}])
def test_a_box_about_something_else_does_not_open(about):
    with pytest.raises(SealBroken):
        open_box(from_anna_to_ben(), about, recipient=BEN, sender=public_key(ANNA))


def test_only_the_recipient_opens_and_only_the_sender_could_have_sealed():
    with pytest.raises(SealBroken):
        open_box(from_anna_to_ben(), ABOUT, recipient=EVE, sender=public_key(ANNA))
    forged = seal_box(b"model", ABOUT, sender=EVE, recipient=public_key(BEN))
    with pytest.raises(SealBroken):
        open_box(forged, ABOUT, recipient=BEN, sender=public_key(ANNA))


def test_a_point_that_gives_everybody_the_same_secret_is_refused():
    with pytest.raises(SealBroken):
        open_box(bytes(32) + from_anna_to_ben()[32:], ABOUT, recipient=BEN, sender=public_key(ANNA))
