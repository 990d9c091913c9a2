"""Masks of a secure sum (Bonawitz et al. 2017): one of each pair of sites, which cancels, and one of each site's own.

A mask is the key stream of ChaCha20, read as whole numbers of 64 bits. Its key comes by HKDF from a secret (that of two
sites by X25519, or the site's own) and from the context: the run, the round, the operation, the mask keys of all sites,
the sites that take part, and a digest of what the site was asked. Sites with another context have other masks, and
these do not cancel.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

#: whole numbers that are made at a time: bounds the memory, and stays in the processor's cache
PIECE = 2**14
_ZEROS = bytes(8 * PIECE)


@dataclass(frozen=True)
class Context:
    """Which sum masks are for."""

    run: str
    round: int
    operation: str
    #: the mask keys of all that gave one, by site
    keys: Mapping[str, bytes]
    #: those of them that take part
    members: Sequence[str]

    @property
    def sum_id(self) -> str:
        """A digest of all that was agreed on before anybody was asked."""
        keys = {site: key.hex() for site, key in sorted(self.keys.items())}
        text = json.dumps([self.run, self.round, self.operation, keys, sorted(self.members)])
        return hashlib.sha256(text.encode()).hexdigest()

    def info(self, question: str) -> bytes:
        """What a mask's key depends on besides the secret; `question` is the digest of what a site was asked."""
        return f"polyclinic mask 1 {self.sum_id} {question}".encode()


def pair_secret(mine: X25519PrivateKey, theirs: bytes) -> bytes:
    """What two sites have in common; ValueError for a public key that is none."""
    return mine.exchange(X25519PublicKey.from_public_bytes(theirs))


def add_masks(numbers: np.ndarray, masks: Iterable[tuple[bytes, int]], info: bytes) -> None:
    """Add masks (secret, and sign 1 to add or -1 to subtract) to whole numbers uint64 [n], modulo 2^64, in place.

    All masks of a piece are added while it lies in the processor's cache: the row goes through memory once."""
    streams = [(_stream(secret, info), np.add if sign > 0 else np.subtract) for secret, sign in masks]
    buffer = bytearray(len(_ZEROS))
    for start in range(0, len(numbers), PIECE):
        piece = numbers[start : start + PIECE]
        zeros, mask = memoryview(_ZEROS)[: 8 * len(piece)], np.frombuffer(buffer, "<u8", len(piece))
        for stream, add in streams:
            stream.update_into(zeros, buffer)
            add(piece, mask, out=piece)


def _stream(secret: bytes, info: bytes) -> CipherContext:
    key = HKDF(SHA256(), length=32, salt=None, info=info).derive(secret)
    return Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()


def sign_of(site: str, other: str, keys: Mapping[str, bytes]) -> int:
    """Whether a site adds or subtracts the mask that it has with another one: they do the opposite."""
    order = sorted(keys)
    return 1 if order.index(site) < order.index(other) else -1


#: the smallest prime above 2^256, so that every 32 bytes are a secret
PRIME = 2**256 + 297
SECRET_BYTES = 32
SHARE_BYTES = 33


def split_secret(
    secret: bytes, threshold: int, shares: int, draw: Callable[[int], int] = lambda _: secrets.randbelow(PRIME)
) -> list[bytes]:
    """The shares of the places 1 to `shares`. `draw(k)` gives the k-th coefficient, from 1, of the polynomial."""
    assert len(secret) == SECRET_BYTES, "a secret has 32 bytes"
    assert 1 <= threshold <= shares < PRIME, "no more shares are needed than there are"
    coefficients = [int.from_bytes(secret, "big"), *(draw(k) % PRIME for k in range(1, threshold))]
    return [_value(coefficients, place).to_bytes(SHARE_BYTES, "big") for place in range(1, shares + 1)]


def combine_shares(shares: Mapping[int, bytes]) -> bytes | None:
    """The secret, from shares by place: at least `threshold` of them. None where they are no shares of 32 bytes."""
    points = {place: int.from_bytes(share, "big") for place, share in shares.items()}
    if not points or any(place < 1 for place in points) or any(value >= PRIME for value in points.values()):
        return None
    found = sum(value * _at_zero(place, points) for place, value in points.items()) % PRIME
    return found.to_bytes(SECRET_BYTES, "big") if found < 2 ** (8 * SECRET_BYTES) else None


def _value(coefficients: list[int], place: int) -> int:
    total = 0
    for coefficient in reversed(coefficients):
        total = (total * place + coefficient) % PRIME
    return total


def _at_zero(place: int, points: Mapping[int, int]) -> int:
    """The Lagrange coefficient of a place, at 0."""
    above, below = 1, 1
    for other in points:
        if other != place:
            above, below = above * other % PRIME, below * (other - place) % PRIME
    return above * pow(below, -1, PRIME) % PRIME
