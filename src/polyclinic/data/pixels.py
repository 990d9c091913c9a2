"""Pixels: bounds on what image files may declare, and intensities in [0, 1] as bytes (uint8).

Bounds are checked by the sizes that a file declares, before anything is decoded: a few kilobytes can declare an image
of gigabytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor  # an exported model's preparation works without torch


#: pixels of one image, or of one slice of a volume: 8192 x 8192
MOST_PIXELS = 2**26
#: a volume may have so many times the pixels of the largest image
VOLUME = 8


def check_pixels(width: int, height: int, most: int, slices: int = 1) -> None:
    """ValueError for an image that declares more pixels than the study allows, or a volume eight times as many."""
    pixels = width * height
    if pixels > most:
        raise ValueError(f"the image has {width} x {height} pixels, above the limit of {most}; raise data.max_pixels")
    if pixels * slices > VOLUME * most:
        raise ValueError(
            f"the volume has {width} x {height} x {slices} voxels, above the limit of {VOLUME} x {most}; "
            "raise data.max_pixels"
        )


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
