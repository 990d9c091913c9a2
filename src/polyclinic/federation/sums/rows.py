"""Rows of whole numbers: the parcels of an operation in fixed point, and back from the sum of such rows.

A number x with weight w becomes round(w x 2^bits), of 64 bits, which add up modulo 2^64 in any order. It must lie
within 2^53, so that float64 holds it exactly and the sum of 1,024 sites cannot overflow. The mean over weights W in all
is then exact up to 2^-bits / W for each site.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
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
