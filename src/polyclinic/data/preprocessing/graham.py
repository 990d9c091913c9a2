"""Fundus photographs as Benjamin Graham prepared them for the 2015 retinopathy competition, and Qu after him."""

from __future__ import annotations

import numpy as np
from PIL import Image

RADIUS = 300
KEPT = 0.9  # of the radius: the rim of the eye, where the local average is of black, is cut away
GREY = 128


def graham(pixels: np.ndarray) -> np.ndarray:
    """uint8 [H, W, 3] to uint8 [540, 540, 3].

    The eye is brought to a radius of 300 pixels, its local average colour is taken away (and what is left made four
    times stronger, around grey), and the rim is cropped.
    """
    from scipy.ndimage import gaussian_filter  # here: every process of a run would pay for it

    eye = scale_radius(pixels).astype(np.float32)
    average = gaussian_filter(eye, sigma=(RADIUS / 30, RADIUS / 30, 0), truncate=3)
    detail = np.clip(4 * (eye - average) + GREY, 0, 255)
    return _inner_disc(detail + 0.5).astype(np.uint8)


def scale_radius(pixels: np.ndarray) -> np.ndarray:
    """The image resized so that the eye, as its middle row shows it, has a radius of 300 pixels."""
    if pixels.ndim != 3:
        raise ValueError("a fundus photograph must have colour")
    bright = pixels[pixels.shape[0] // 2].sum(axis=1, dtype=np.int64)
    radius = int((bright > bright.mean() / 10).sum()) / 2
    if radius == 0:
        raise ValueError("the middle row of the image is black: there is no eye")
    factor = RADIUS / radius
    height, width = (max(1, round(edge * factor)) for edge in pixels.shape[:2])
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC))


def _inner_disc(image: np.ndarray) -> np.ndarray:
    """The square around the centre that holds 90 % of the eye's radius, grey outside that disc."""
    reach = round(RADIUS * KEPT)
    out = np.full((2 * reach, 2 * reach, 3), GREY, dtype=image.dtype)
    height, width = (min(edge, 2 * reach) for edge in image.shape[:2])
    top, left = ((edge - size) // 2 for edge, size in zip(image.shape[:2], (height, width), strict=True))
    above, before = (2 * reach - height) // 2, (2 * reach - width) // 2
    out[above : above + height, before : before + width] = image[top : top + height, left : left + width]
    at = np.arange(2 * reach) - reach + 0.5
    outside = at[:, None] ** 2 + at[None, :] ** 2 > reach**2
    out[outside] = GREY
    return out
