"""Shamir's secret sharing (1979): a secret of 32 bytes in n shares, any `threshold` of which give it back.

The secret is the value at 0 of a random polynomial over the integers modulo a prime, a share is its value at the
holder's place (1, 2, ...). Fewer shares than the threshold say nothing about the secret.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

#: the smallest prime above 2^256, so that every 32 bytes are a secret
PRIME = 2**256 + 297
SECRET_BYTES = 32
SHARE_BYTES = 33


def split(
    secret: bytes, threshold: int, shares: int, draw: Callable[[int], int] = lambda _: secrets.randbelow(PRIME)
) -> list[bytes]:
    """The shares of the places 1 to `shares`. `draw(k)` gives the k-th coefficient, from 1, of the polynomial."""
    assert len(secret) == SECRET_BYTES, "a secret has 32 bytes"
    assert 1 <= threshold <= shares < PRIME, "no more shares are needed than there are"
    coefficients = [int.from_bytes(secret, "big"), *(draw(k) % PRIME for k in range(1, threshold))]
    return [_value(coefficients, place).to_bytes(SHARE_BYTES, "big") for place in range(1, shares + 1)]


def combine(shares: Mapping[int, bytes]) -> bytes | None:
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
