"""Signatures of ledger lines: one text for each, and no other one."""

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from polyclinic.federation.ledger.keys import sign_line, signer_of_line, signing_public_key


def test_a_signature_in_other_letters_is_not_the_one_that_was_written():
    key = Ed25519PrivateKey.from_private_bytes(bytes(32))
    keys, signature = [signing_public_key(key)], sign_line(key, "a" * 64)
    assert signer_of_line(keys, "a" * 64, signature) == 0
    for changed in (signature.upper(), f" {signature}", signature[:-2], signature + "00", "no digits", 7, None):
        assert signer_of_line(keys, "a" * 64, changed) is None
