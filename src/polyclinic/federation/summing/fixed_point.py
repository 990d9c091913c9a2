"""Fixed point: floating-point numbers as whole numbers of 64 bits, which add up modulo 2^64 in any order.

A number x with weight w becomes round(w x 2^bits). It must lie within 2^53, so that float64 holds it exactly and the
sum of 1,024 sites cannot overflow. The mean over weights W in all is then exact up to 2^-bits / W for each site.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

#: largest whole number that one site may add
LARGEST = 2**53


class TooLarge(Exception):  # noqa: N818
    """A number that does not fit; says the largest one that does."""


def write_whole(values: Tensor, weight: int, bits: int, row: np.ndarray) -> None:
    """Numbers times a weight as whole numbers of 2^-bits into uint64 `row` [n]; whole ones keep a resolution of 1.
    TooLarge leaves it unfinished."""
    if values.dtype.is_floating_point:
        whole = values.detach().double().mul(weight * 2.0**bits).round_()
        if whole.numel():
            low, high = whole.aminmax()
            _check(max(float(high), -float(low)), weight, bits)
    else:
        if values.numel():  # before they are multiplied, which could wrap around
            _check(_largest(values) * weight, weight, 0)
        whole = values.detach().long() * weight
    torch.from_numpy(row.view(np.int64)).copy_(whole.flatten())


def _largest(values: Tensor) -> int:
    """The largest absolute value of whole numbers, as Python counts: the smallest of 64 bits has no opposite there."""
    return max(int(values.max()), -int(values.min()))


def _check(largest: float, weight: int, bits: int) -> None:
    if not largest <= LARGEST:
        raise TooLarge(
            f"{largest / weight / 2.0**bits:.4g}, and with {weight} as weight ±{limit(weight, bits):.4g} fit"
        )


def count_to_whole(count: float, bits: int) -> int:
    """A count, whole or expected, as a whole number of 2^-bits; TooLarge where it does not fit."""
    found = count * 2.0**bits
    if not 0 <= found <= LARGEST:
        raise TooLarge(f"{count:.4g} images, and up to {LARGEST / 2.0**bits:.4g} fit")
    return round(found)


def limit(weight: int, bits: int) -> float:
    """The largest number that fits with this weight."""
    return LARGEST / weight / 2.0**bits


def from_whole(total: np.ndarray, weight: int, bits: int, dtype: torch.dtype) -> Tensor:
    """The mean that a sum of whole numbers uint64 [n] stands for, where the weights add up to `weight`."""
    signed = torch.from_numpy(total.view(np.int64).copy())
    if dtype.is_floating_point:
        return (signed.double() / (weight * 2.0**bits)).to(dtype)
    return signed.to(dtype) if weight == 1 else (signed.double() / weight).round().to(dtype)
