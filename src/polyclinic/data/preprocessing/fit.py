"""Cropping, resizing and colour conversion to a square image of the study's size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image

Shape = Literal["squash", "pad", "crop"]
Channels = Literal["auto", 1, 3]


@dataclass(frozen=True)
class Fit:
    """Side in pixels, what to do with oblong images, and how many channels to make."""

    size: int
    shape: Shape = "squash"
    channels: Channels = "auto"


def fit_image(pixels: np.ndarray, fit: Fit, channels: int) -> np.ndarray:
    """uint8 [H, W] or [H, W, 3] to uint8 [channels, size, size]."""
    pixels = make_square(_check(pixels), fit.shape)
    picture = Image.fromarray(np.ascontiguousarray(pixels)).convert("L" if channels == 1 else "RGB")
    if picture.size != (fit.size, fit.size):
        picture = picture.resize((fit.size, fit.size), Image.Resampling.BICUBIC)
    array = np.asarray(picture)
    return array[None] if channels == 1 else array.transpose(2, 0, 1)


def fit_mask(mask: np.ndarray, fit: Fit) -> np.ndarray:
    """[H, W] to uint8 [size, size] of 0/1: a pixel is inside when most of what it covers is."""
    if mask.ndim != 2:
        raise ValueError(f"a mask must be [H, W], not {mask.shape}")
    inside = make_square((mask > 0).astype(np.uint8) * 255, fit.shape)
    picture = Image.fromarray(inside)
    if picture.size != (fit.size, fit.size):
        picture = picture.resize((fit.size, fit.size), Image.Resampling.BOX)
    return (np.asarray(picture) >= 128).astype(np.uint8)


def make_square(pixels: np.ndarray, shape: Shape) -> np.ndarray:
    """Pads with zeros around the centre, or crops to it; "squash" leaves the sides to the resizing."""
    height, width = pixels.shape[:2]
    if shape == "squash" or height == width:
        return pixels
    if shape == "crop":
        return crop_centre(pixels, min(height, width))
    side = max(height, width)
    above, left = (side - height) // 2, (side - width) // 2
    around = [(above, side - height - above), (left, side - width - left), (0, 0)]
    return np.pad(pixels, around[: pixels.ndim])


def crop_centre(pixels: np.ndarray, side: int) -> np.ndarray:
    """The central square of `side` pixels, or the whole of an edge that is shorter."""
    above, left = ((max(edge - side, 0)) // 2 for edge in pixels.shape[:2])
    return pixels[above : above + side, left : left + side]


def is_colour(pixels: np.ndarray) -> bool:
    """Whether the three channels differ; many grey radiographs are stored as colour."""
    return pixels.ndim == 3 and bool((pixels[..., :1] != pixels).any())


def _check(pixels: np.ndarray) -> np.ndarray:
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] != 3):
        raise ValueError(f"pixels must be uint8 [H, W] or [H, W, 3], not {pixels.dtype} {pixels.shape}")
    if 0 in pixels.shape:
        raise ValueError("the image is empty")
    return pixels
