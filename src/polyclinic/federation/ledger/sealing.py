"""Sealing: end-to-end encryption of bytes from one site to another (X25519, HKDF, ChaCha20-Poly1305).

A key of two Diffie-Hellman exchanges (X25519): of a pair drawn for this one box with the recipient's, which keeps old
boxes shut, and of the sender's own with the recipient's, which only the two of them can make, so that the box is from
whom it says. HKDF makes the key, ChaCha20-Poly1305 seals. What the bytes are about (who, to whom, when) travels open
and is bound to them: a box handed to another site, in another round or under another name does not open.
"""

from __future__ import annotations

import json

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from polyclinic.json_types import JsonMapping

KEY_BYTES = 32
#: bytes that a box is longer than what it holds: the pair drawn for it, and the seal
OVERHEAD = KEY_BYTES + 16
#: every box has a key of its own, so there is no second message that could meet the same nonce
NONCE = bytes(12)


class SealBroken(Exception):  # noqa: N818
    """A box that does not open: changed on its way, made by another, for another, or about something else."""


def public_key(key: X25519PrivateKey) -> bytes:
    """What the others need to know, 32 bytes."""
    return key.public_key().public_bytes_raw()


def seal(
    plain: bytes,
    about: JsonMapping,
    *,
    sender: X25519PrivateKey,
    recipient: bytes,
    drawn: X25519PrivateKey | None = None,
) -> bytearray:
    """A box for the owner of the public key `recipient`; `about` (plain JSON values) is bound to it, not in it.

    `drawn` is the pair for this one box, where it must follow from a seed; never give the same one twice.

    Models have tens of megabytes, so they are sealed into the box and opened out of it without a copy in between.
    """
    drawn = drawn or X25519PrivateKey.generate()
    theirs = X25519PublicKey.from_public_bytes(recipient)
    names = public_key(drawn) + public_key(sender) + recipient
    key = _key(drawn.exchange(theirs) + sender.exchange(theirs), names)
    box = bytearray(len(plain) + OVERHEAD)
    box[:KEY_BYTES] = public_key(drawn)
    ChaCha20Poly1305(key).encrypt_into(NONCE, plain, _as_bytes(about), memoryview(box)[KEY_BYTES:])
    return box


def unseal(
    box: bytes | bytearray | memoryview, about: JsonMapping, *, recipient: X25519PrivateKey, sender: bytes
) -> bytes:
    """What `seal` was given, by the owner of the public key `sender` and about the same; else SealBroken."""
    view = memoryview(box)
    drawn, sealed = bytes(view[:KEY_BYTES]), view[KEY_BYTES:]
    try:
        shared = [recipient.exchange(X25519PublicKey.from_public_bytes(public)) for public in (drawn, sender)]
        key = _key(b"".join(shared), drawn + sender + public_key(recipient))
        return ChaCha20Poly1305(key).decrypt(NONCE, sealed, _as_bytes(about))
    except (InvalidTag, ValueError) as error:  # ValueError: cut short, or a point at which X25519 is not safe
        raise SealBroken("it was changed on its way, or sealed by or for somebody else") from error


def _key(shared: bytes, names: bytes) -> bytes:
    return HKDF(SHA256(), length=32, salt=None, info=b"polyclinic sealing 1" + names).derive(shared)


def _as_bytes(about: JsonMapping) -> bytes:
    return json.dumps(dict(about), sort_keys=True).encode()
