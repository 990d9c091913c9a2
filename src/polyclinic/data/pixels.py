"""Intensities in [0, 1] as bytes (uint8): the 256 grey values that images are kept and sent with."""

from __future__ import annotations

from typing import overload

import numpy as np
import torch
from torch import Tensor


@overload
def to_uint8(values: np.ndarray) -> np.ndarray: ...


@overload
def to_uint8(values: Tensor) -> Tensor: ...


def to_uint8(values: np.ndarray | Tensor) -> np.ndarray | Tensor:
    """Intensities in [0, 1] times 255, rounded; what lies outside is clipped. A tensor comes back on the CPU.

    Halves are rounded up in arrays (images that are read or drawn), and to even in tensors (images that a network
    makes). Results of both are recorded to the last bit, so both rules stay.
    """
    if isinstance(values, Tensor):
        return values.float().clamp(0, 1).mul(255).round().to(torch.uint8).contiguous().cpu()
    return (np.clip(values, 0, 1) * 255 + 0.5).astype(np.uint8)
