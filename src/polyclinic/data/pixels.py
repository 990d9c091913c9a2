"""Intensities in [0, 1] as bytes (uint8): the 256 grey values that images are kept and sent with."""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor  # an exported model's preparation works without torch


@overload
def to_uint8(values: np.ndarray) -> np.ndarray: ...


@overload
def to_uint8(values: Tensor) -> Tensor: ...


def to_uint8(values: np.ndarray | Tensor) -> np.ndarray | Tensor:
    """Intensities in [0, 1] times 255, rounded; what lies outside is clipped. A tensor comes back on the CPU.

    Halves are rounded up in arrays (images that are read or drawn), and to even in tensors (images that a network
    makes). Results of both are recorded to the last bit, so both rules stay.
    """
    if isinstance(values, np.ndarray | np.generic):
        return (np.clip(values, 0, 1) * 255 + 0.5).astype(np.uint8)
    return values.float().clamp(0, 1).mul(255).round().byte().contiguous().cpu()
