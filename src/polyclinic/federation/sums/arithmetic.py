"""Rows of whole numbers: the parcels of an operation in fixed point, back from the sum of such rows, and the masks over
rows of a secure sum (Bonawitz et al. 2017): one of each pair of sites, which cancels, and one of each site's own.

A number x with weight w becomes round(w x 2^bits), of 64 bits, which add up modulo 2^64 in any order. It must lie
within 2^53, so that float64 holds it exactly and the sum of 1,024 sites cannot overflow. The mean over weights W in all
is then exact up to 2^-bits / W for each site.

A mask is the key stream of ChaCha20, read as whole numbers of 64 bits. Its key comes by HKDF from a secret (that of two
sites by X25519, or the site's own) and from the context: the run, the round, the operation, the mask keys of all sites,
the sites that take part, and a digest of what the site was asked. Sites with another context have other masks, and
these do not cancel.
"""

import hashlib
import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel

#: largest whole number that one site may add
LARGEST = 2**53


class TooLarge(Exception):  # noqa: N818
    """A number that does not fit; says the largest one that does."""


def write_whole(values: Tensor, weight: int, bits: int, row: np.ndarray) -> None:
    """Numbers times a weight as whole numbers of 2^-bits into uint64 `row` [n]; whole ones keep a resolution of 1.
    TooLarge leaves it unfinished."""
    values, largest = values.detach(), 0.0
    if values.dtype.is_floating_point:
        whole = values.double().mul(weight * 2.0**bits).round_()
        if whole.numel():
            low, high = whole.aminmax()
            largest = max(float(high), -float(low))
    else:
        bits, whole = 0, values.long() * weight
        if values.numel():  # as Python counts: the product could wrap around, and the smallest has no opposite
            largest = max(int(values.max()), -int(values.min())) * weight
    if not largest <= LARGEST:
        raise TooLarge(
            f"{largest / weight / 2.0**bits:.4g}, and with {weight} as weight ±{LARGEST / weight / 2.0**bits:.4g} fit"
        )
    torch.from_numpy(row.view(np.int64)).copy_(whole.flatten())


def count_to_whole(count: float, bits: int) -> int:
    """A count, whole or expected, as a whole number of 2^-bits; TooLarge where it does not fit."""
    found = count * 2.0**bits
    if not 0 <= found <= LARGEST:
        raise TooLarge(f"{count:.4g} images, and up to {LARGEST / 2.0**bits:.4g} fit")
    return round(found)


def from_whole(total: np.ndarray, weight: int, bits: int, dtype: torch.dtype) -> Tensor:
    """The mean that a sum of whole numbers uint64 [n] stands for, where the weights add up to `weight`."""
    signed = torch.from_numpy(total.view(np.int64).copy())
    if dtype.is_floating_point:
        return (signed.double() / (weight * 2.0**bits)).to(dtype)
    return signed.to(dtype) if weight == 1 else (signed.double() / weight).round().to(dtype)


#: in a mean in which all sites count alike, a site has this weight, so that small gradients are not rounded away
UNIFORM = 1024
#: whole numbers at the end of a row: the weight, the number of images that `expected` says, and 1 for the site itself
TAIL = 3
#: finest resolution of a number of images: there is room for 500 million of them
COUNT_BITS = 24
#: kind, name, dtype and shape of each tensor in a row
Layout = list[list[Any]]


def row_of(parcels: Sequence[Parcel], *, mean: bool, weighting: str, bits: int) -> tuple[np.ndarray, Layout]:
    """The row of what a site releases, uint64 [n], and what its numbers are; TooLarge names a tensor that does not fit.

    `mean`: the sites' weighted mean is wanted, else their sum.
    """
    metadata = {name: value for parcel in parcels for name, value in parcel.metadata.items()}
    weight = 1 if not mean else int(metadata["samples"]) if weighting == "samples" else UNIFORM
    row, start = np.empty(sum(t.numel() for p in parcels for t in p.tensors.values()) + TAIL, np.uint64), 0
    layout: Layout = []
    for parcel in parcels:
        for name, tensor in parcel.tensors.items():
            end = start + tensor.numel()
            try:
                write_whole(tensor, weight, bits, row[start:end])
            except TooLarge as error:
                raise TooLarge(f"{parcel.kind} '{name}' holds {error}") from None
            layout.append([parcel.kind, name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])
            start = end
    try:
        expected = count_to_whole(float(metadata.get("expected", 0.0)), min(bits, COUNT_BITS))
        row[start:] = [count_to_whole(weight, 0), expected, 1]
    except TooLarge as error:
        raise TooLarge(f"the number of images is {error}") from None
    return row, layout


def parcels_of(
    total: np.ndarray, layout: Layout, kinds: Sequence[str], *, mean: bool, bits: int, sites: int
) -> tuple[Parcel, ...]:
    """What the sum of `sites` rows says: the mean or the sum of each tensor, by kind. ParcelRejected where the row
    cannot be the sum of so many."""
    weight, expected, counted = (int(number) for number in total[-TAIL:].view(np.int64))
    if counted != sites or weight < 1:
        raise ParcelRejected("the sum is not that of the sites: their masks do not cancel, or a site lied")
    found: dict[str, dict[str, Tensor]] = {kind: {} for kind in kinds}
    start = 0
    for kind, name, dtype, shape in layout:
        end = start + int(np.prod(shape, dtype=np.int64))
        of_tensor = from_whole(total[start:end], weight if mean else 1, bits, getattr(torch, dtype))
        found[kind][name] = of_tensor.reshape(shape)
        start = end
    metadata = {"samples": weight, "expected": expected / 2 ** min(bits, COUNT_BITS), "sites": sites}
    return tuple(Parcel(kind, tensors, metadata) for kind, tensors in found.items())


def check_layout(layout: Any, numbers: Tensor, kinds: Sequence[str]) -> None:
    """ParcelRejected unless a row that came has the form that its layout says."""
    if not isinstance(layout, list) or not all(_is_entry(entry, kinds) for entry in layout):
        raise ParcelRejected("a summand's layout is no list of kinds, names, dtypes and shapes")
    length = sum(int(np.prod(entry[3], dtype=object)) for entry in layout) + TAIL
    if numbers.dtype != torch.int64 or tuple(numbers.shape) != (length,):
        raise ParcelRejected(f"a summand of {length} whole numbers was expected, and {tuple(numbers.shape)} came")


def check_open(numbers: Tensor) -> None:
    """ParcelRejected for a row in the clear that no site can have made: it would overflow, or count for several."""
    low, high = (int(one) for one in numbers.aminmax())
    weight, expected, counted = numbers[-TAIL:].tolist()
    if max(high, -low) > LARGEST or weight < 0 or expected < 0 or counted != 1:
        raise ParcelRejected("a summand holds numbers beyond 2^53, or does not count as one site")


def _is_entry(entry: Any, kinds: Sequence[str]) -> bool:
    if not isinstance(entry, list) or len(entry) != 4 or entry[0] not in kinds or not isinstance(entry[1], str):
        return False
    is_dtype = isinstance(entry[2], str) and isinstance(getattr(torch, entry[2], None), torch.dtype)
    return is_dtype and isinstance(entry[3], list) and all(type(side) is int and side >= 0 for side in entry[3])


def digest_of_question(parcels: Mapping[str, Parcel], arguments: Mapping[str, Any]) -> str:
    """A digest of what a site was asked: sites that were asked something else have other masks."""
    digests = {name: parcel.digest for name, parcel in sorted(parcels.items())}
    return hashlib.sha256(json.dumps([digests, dict(arguments)], sort_keys=True).encode()).hexdigest()


# --- masks -----------------------------------------------------------------------------------------------

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
    streams = []
    for secret, sign in masks:
        key = HKDF(SHA256(), length=32, salt=None, info=info).derive(secret)
        stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
        streams.append((stream, np.add if sign > 0 else np.subtract))
    buffer = bytearray(len(_ZEROS))
    for start in range(0, len(numbers), PIECE):
        piece = numbers[start : start + PIECE]
        zeros, mask = memoryview(_ZEROS)[: 8 * len(piece)], np.frombuffer(buffer, "<u8", len(piece))
        for stream, add in streams:
            stream.update_into(zeros, buffer)
            add(piece, mask, out=piece)


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
    coefficients, found = [int.from_bytes(secret, "big"), *(draw(k) % PRIME for k in range(1, threshold))], []
    for place in range(1, shares + 1):
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * place + coefficient) % PRIME
        found.append(value.to_bytes(SHARE_BYTES, "big"))
    return found


def combine_shares(shares: Mapping[int, bytes]) -> bytes | None:
    """The secret, from shares by place: at least `threshold` of them. None where they are no shares of 32 bytes."""
    points = {place: int.from_bytes(share, "big") for place, share in shares.items()}
    if not points or any(place < 1 for place in points) or any(value >= PRIME for value in points.values()):
        return None
    found = 0
    for place, value in points.items():
        above, below = 1, 1  # of the Lagrange coefficient of this place, at 0
        for other in points.keys() - {place}:
            above, below = above * other % PRIME, below * (other - place) % PRIME
        found = (found + value * above * pow(below, -1, PRIME)) % PRIME
    return found.to_bytes(SECRET_BYTES, "big") if found < 2 ** (8 * SECRET_BYTES) else None
