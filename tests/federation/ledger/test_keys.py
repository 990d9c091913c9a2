"""Keys: rings, signatures of one text and no other, boxes that open for one key and about one thing."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from pinned_keys import pin_keys

from polyclinic.errors import BadInput
from polyclinic.federation.ledger.keys import (
    OVERHEAD,
    KitKeys,
    SealBroken,
    SeedKeys,
    open_box,
    public_key,
    seal_box,
    sign_line,
    signer_of_line,
    signing_public_key,
)


def test_kits_have_their_own_keys_and_the_public_ones_of_all(tmp_path):
    local = {name: tmp_path / name for name in ("north", "south", "server")}
    for folder in local.values():
        folder.mkdir()
    pin_keys({name: local[name] for name in ("north", "south")}, local["server"])
    rings = {name: KitKeys(folder) for name, folder in local.items()}
    assert [ring.owner() for ring in rings.values()] == ["north", "south", "coordinator"]
    for name, ring in rings.items():
        assert (local[name] / "signing.key").stat().st_mode & 0o777 == 0o600
        mine = (signing_public_key(ring.signing_key()),)
        assert {other.verifying_keys(ring.owner()) for other in rings.values()} == {mine}
        assert ring.verifying_keys("phantom") == ()
    assert not (local["server"] / "sealing.key").exists()
    with pytest.raises(BadInput, match=r"sealing\.key: is missing"):
        KitKeys(tmp_path).own("north")
    assert SeedKeys(1).public("a") == SeedKeys(1).public("a") == public_key(SeedKeys(1).own("a"))
    assert len({SeedKeys(seed).public(name) for seed in (1, 2) for name in "ab"}) == 4


def test_a_signature_in_other_letters_is_not_the_one_that_was_written():
    key = Ed25519PrivateKey.from_private_bytes(bytes(32))
    keys, signature = [signing_public_key(key)], sign_line(key, "a" * 64)
    assert signer_of_line(keys, "a" * 64, signature) == 0
    for changed in (signature.upper(), f" {signature}", signature[:-2], signature + "00", "no digits", 7, None):
        assert signer_of_line(keys, "a" * 64, changed) is None


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


def test_only_the_recipient_opens_what_the_sender_alone_could_have_sealed():
    with pytest.raises(SealBroken):
        open_box(from_anna_to_ben(), ABOUT, recipient=EVE, sender=public_key(ANNA))
    forged = seal_box(b"model", ABOUT, sender=EVE, recipient=public_key(BEN))
    with pytest.raises(SealBroken):
        open_box(forged, ABOUT, recipient=BEN, sender=public_key(ANNA))
    with pytest.raises(SealBroken):
        open_box(bytes(32) + from_anna_to_ben()[32:], ABOUT, recipient=BEN, sender=public_key(ANNA))
