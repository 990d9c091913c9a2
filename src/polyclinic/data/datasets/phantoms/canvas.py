"""Drawing in unit coordinates, so that the same anatomy appears at every image size.

x runs from -1 (left) to 1 (right), y from -1 (top) to 1 (bottom). What is narrower than a pixel is widened
and dimmed in proportion.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

Numbers = np.ndarray | float

PIXEL_BLUR = 0.45  # radius, in pixels, below which nothing is drawn sharper


@lru_cache(maxsize=64)
def interpolation(size: int, knots: int) -> np.ndarray:
    """Weights [size, knots] of smooth (cubic B-spline) interpolation between evenly spaced knots."""
    at = (np.arange(size) + 0.5) / size * (knots - 3) + 1
    distance = np.abs(at[:, None] - np.arange(knots)[None])
    near = 2 / 3 - distance**2 * (1 - distance / 2)
    far = np.clip(2 - distance, 0, None) ** 3 / 6
    return np.where(distance < 1, near, far).astype(np.float32)


class Canvas:
    """A square of `size` pixels; its methods give float32 [size, size] layers to be combined."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.pixel = 2 / size
        middle = ((np.arange(size) + 0.5) * self.pixel - 1).astype(np.float32)
        self.x, self.y = middle[None, :], middle[:, None]

    def ellipse(self, x: float, y: float, rx: float, ry: float, angle: float = 0.0, soft: float = 0.0) -> np.ndarray:
        """1 inside, 0 outside, with an edge about `soft` wide (at least a pixel)."""
        cos, sin = np.cos(angle), np.sin(angle)
        u = ((self.x - x) * cos + (self.y - y) * sin) / rx
        v = ((self.y - y) * cos - (self.x - x) * sin) / ry
        distance = (1 - np.sqrt(u * u + v * v)) * min(rx, ry)
        return np.clip(distance / max(soft, self.pixel) + 0.5, 0, 1)

    def glow(self, x: float, y: float, rx: float, ry: float | None = None, angle: float = 0.0) -> np.ndarray:
        """A Gaussian bump of height 1."""
        cos, sin = np.cos(angle), np.sin(angle)
        u = ((self.x - x) * cos + (self.y - y) * sin) / rx
        v = ((self.y - y) * cos - (self.x - x) * sin) / (ry or rx)
        return np.exp(-0.5 * (u * u + v * v))

    def texture(self, rng: np.random.Generator, knots: int) -> np.ndarray:
        """A smooth random field of about unit variance, the same at every size; more knots, finer grain."""
        weights = interpolation(self.size, knots + 3)
        field = weights @ rng.standard_normal((knots + 3, knots + 3), dtype=np.float32) @ weights.T
        return field * 2.0  # a B-spline of unit noise has a standard deviation of about one half

    def spots(self, x: Numbers, y: Numbers, radius: Numbers, strength: Numbers) -> np.ndarray:
        """Flat-topped spots; where they overlap the strongest counts. Arguments are [n], or one for all."""
        return self._stamp(x, y, radius, strength, thin_power=2)

    def strokes(self, x: Numbers, y: Numbers, radius: Numbers, strength: Numbers) -> np.ndarray:
        """Like spots, for points densely along lines: a thin line dims with its width, not with its area."""
        return self._stamp(x, y, radius, strength, thin_power=1)

    def _stamp(self, x, y, radius, strength, *, thin_power: int) -> np.ndarray:
        x, y, radius, strength = (np.ravel(a) for a in np.broadcast_arrays(x, y, radius, strength))
        wide = np.hypot(radius, PIXEL_BLUR * self.pixel)
        strength = strength * (radius / wide) ** thin_power
        layer = np.zeros((self.size, self.size), dtype=np.float32)
        reach = np.ceil(1.6 * wide / self.pixel).astype(int)
        for r in np.unique(reach):  # stamps of one reach share one window
            self._stamp_windows(layer, r, *(a[reach == r] for a in (x, y, wide, strength)))
        return layer

    def _stamp_windows(self, layer, reach, x, y, wide, strength) -> None:
        offset = np.arange(-reach, reach + 1)
        column = ((x + 1) / self.pixel).astype(int)[:, None] + offset
        row = ((y + 1) / self.pixel).astype(int)[:, None] + offset
        u = ((column + 0.5) * self.pixel - 1 - x[:, None]) / wide[:, None]
        v = ((row + 0.5) * self.pixel - 1 - y[:, None]) / wide[:, None]
        square = v[:, :, None] ** 2 + u[:, None, :] ** 2
        value = strength[:, None, None] * np.exp(-(square**2))
        inside = ((row >= 0) & (row < self.size))[:, :, None] & ((column >= 0) & (column < self.size))[:, None, :]
        where = row[:, :, None] * self.size + column[:, None, :]
        np.maximum.at(layer.reshape(-1), where[inside], value[inside].astype(np.float32))


def random_walk(
    rng: np.random.Generator,
    x: float,
    y: float,
    heading: float,
    length: float,
    bend: float,
    wobble: float,
    step: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A curve from (x, y): x, y and headings [n], `step` apart, turning by `bend` in all, with a wobble.

    The number of draws does not depend on the step, so the curve is the same at every image size.
    """
    n = max(2, int(np.ceil(length / step)))
    along = np.linspace(0, 1, n)
    wave = rng.standard_normal(4) * wobble
    headings = heading + bend * along
    for k, amplitude in enumerate(wave):
        headings = headings + amplitude * np.sin((k + 1) * np.pi * along) / (k + 1)
    advance = length / n
    return x + np.cumsum(np.cos(headings)) * advance, y + np.cumsum(np.sin(headings)) * advance, headings


def to_bytes(image: np.ndarray) -> np.ndarray:
    """uint8 from intensities in [0, 1]."""
    return (np.clip(image, 0, 1) * 255 + 0.5).astype(np.uint8)
