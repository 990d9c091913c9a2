"""Phantoms drawn in unit coordinates: the canvas, and what phantoms have in common."""

import json
from abc import abstractmethod
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, PrivateAttr

from polyclinic.data.dataset import Dataset
from polyclinic.data.pixels import to_uint8
from polyclinic.data.source import SPREAD, Source, black_images
from polyclinic.randomness import numpy_rng

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

    def _stamp(self, x: Numbers, y: Numbers, radius: Numbers, strength: Numbers, *, thin_power: int) -> np.ndarray:
        across, down, narrow, full = (np.ravel(a) for a in np.broadcast_arrays(x, y, radius, strength))
        wide = np.hypot(narrow, PIXEL_BLUR * self.pixel)
        dimmed = full * (narrow / wide) ** thin_power
        layer = np.zeros((self.size, self.size), dtype=np.float32)
        reach = np.ceil(1.6 * wide / self.pixel).astype(int)
        for r in np.unique(reach):  # stamps of one reach share one window
            self._stamp_windows(layer, r, *(a[reach == r] for a in (across, down, wide, dimmed)))
        return layer

    def _stamp_windows(
        self, layer: np.ndarray, reach: int, x: np.ndarray, y: np.ndarray, wide: np.ndarray, strength: np.ndarray
    ) -> None:
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


def random_walks(
    rng: np.random.Generator,
    start: np.ndarray,
    heading: np.ndarray,
    length: np.ndarray,
    *,
    bend: Numbers,
    wobble: float,
    step: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """n curves from start [2, n]: x, y and headings, all [n, m], points at most `step` apart.

    Each turns by `bend` in all, and wobbles. What is drawn from `rng` does not depend on the step, so the curves are
    the same at every image size.
    """
    n = len(heading)
    along = np.linspace(0, 1, max(2, int(np.ceil(length.max(initial=0) / step))))
    waves = np.array([np.sin(k * np.pi * along) / k for k in range(1, 5)])
    headings = heading[:, None] + np.broadcast_to(bend, n)[:, None] * along
    headings = headings + wobble * rng.standard_normal((n, 4)) @ waves
    advance = length[:, None] / len(along)
    x = start[0][:, None] + np.cumsum(np.cos(headings), axis=1) * advance
    y = start[1][:, None] + np.cumsum(np.sin(headings), axis=1) * advance
    return x, y, headings


def paint(image: np.ndarray, colour: np.ndarray, layer: np.ndarray) -> np.ndarray:
    """`image` [3, H, W] covered by `colour` [3] as densely as `layer` [H, W] says."""
    return image + (colour[:, None, None] - image) * layer


#: bytes of images; larger sets are drawn again instead of being kept in memory
MOST_KEPT = 32 * 2**20


class Phantom(Source):
    """A source that draws its images. Image i depends on (seed, i) only, not on how many there are."""

    samples: int = Field(2000, ge=10, le=1_000_000, description="number of images")
    size: int = Field(64, ge=28, le=256, description="side of the square images, in pixels")

    channels: ClassVar[int] = 1
    #: labels and all else are drawn, and no image
    _undrawn: bool = PrivateAttr(False)

    def rng(self, index: int, purpose: str) -> np.random.Generator:
        """Draws for image `index`: of its "label", its "anatomy", or its "grain" (noise per pixel)."""
        return numpy_rng(self.seed, self.source, index, purpose)

    def draw_all(self, cases: Iterable) -> np.ndarray:
        """The image of each case, uint8 [samples, channels, size, size]; what a case is, `draw` knows."""
        if self._undrawn:
            return black_images(self.samples, self.channels, self.size)
        images = np.empty((self.samples, self.channels, self.size, self.size), dtype=np.uint8)
        canvas = Canvas(self.size)
        for i, case in enumerate(cases):
            image = self.draw(canvas, case, self.rng(i, "anatomy"))
            grain = self.rng(i, "grain").standard_normal(image.shape, dtype=np.float32)
            images[i] = to_uint8(image + self.grain() * grain)
        return images

    def load_shared(self) -> Dataset:
        """The same phantoms are drawn once a process: a comparison wants them for every seed and fold."""
        if self.samples * self.channels * self.size**2 > MOST_KEPT:
            return self.load()
        settings = {name: value for name, value in self.model_dump(mode="json").items() if name not in SPREAD}
        return _kept(type(self), json.dumps(settings, sort_keys=True))

    def without_pixels(self) -> Dataset:
        plain = self.model_copy()
        plain._undrawn = True
        return plain.load()

    def grain(self) -> float:
        """Standard deviation of the sensor's noise, of intensities in [0, 1]."""
        return 0.02

    @abstractmethod
    def draw(self, canvas: Canvas, case: Any, rng: np.random.Generator) -> np.ndarray:
        """One image of intensities in [0, 1], float32 [channels, size, size], before the sensor's noise."""


@lru_cache(maxsize=4)
def _kept(kind: type[Phantom], settings: str) -> Dataset:
    dataset = kind.model_validate_json(settings).load()
    arrays = (getattr(dataset, name) for name in Dataset.PER_IMAGE)
    for array in arrays:
        if array is not None:
            array.flags.writeable = False  # the next who asks gets the same array
    return dataset
