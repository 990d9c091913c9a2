"""What phantoms have in common: so many images, each drawn from its own address."""

from __future__ import annotations

import functools
import json
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from polyclinic.data.dataset import Dataset
from polyclinic.data.datasets.phantoms.canvas import Canvas
from polyclinic.data.pixels import to_uint8
from polyclinic.data.source import Source, black_images
from polyclinic.randomness import numpy_rng

#: settings that say which image goes where and how its site's camera changes it, not how it is drawn
SPREAD = ("validation", "test", "fold", "test_per_class", "test_total_per_class", "acquisition")
#: bytes of images; larger sets are drawn again instead of being kept in memory
MOST_KEPT = 32 * 2**20


class Phantom(Source):
    """A source that draws its images. Image i depends on (seed, i) only, not on how many there are."""

    samples: int = Field(2000, ge=10, le=1_000_000, description="number of images")
    size: int = Field(64, ge=28, le=256, description="side of the square images, in pixels")

    channels: ClassVar[int] = 1

    def rng(self, index: int, purpose: str) -> np.random.Generator:
        """Draws for image `index`: of its "label", its "anatomy", or its "grain" (noise per pixel)."""
        return numpy_rng(self.seed, self.source, index, purpose)

    def draw_all(self, cases: Iterable) -> np.ndarray:
        """The image of each case, uint8 [samples, channels, size, size]; what a case is, `draw` knows."""
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
        return _undrawn(type(self)).model_validate(self.model_dump()).load()

    def grain(self) -> float:
        """Standard deviation of the sensor's noise, of intensities in [0, 1]."""
        return 0.02

    @abstractmethod
    def draw(self, canvas: Canvas, case: Any, rng: np.random.Generator) -> np.ndarray:
        """One image of intensities in [0, 1], float32 [channels, size, size], before the sensor's noise."""


class Undrawn:
    """Comes before a phantom's class: labels and all else are drawn, and no image."""

    samples: int
    size: int
    channels: ClassVar[int]

    def draw_all(self, cases: Iterable) -> np.ndarray:
        return black_images(self.samples, self.channels, self.size)


@functools.lru_cache(maxsize=4)
def _kept(kind: type[Phantom], settings: str) -> Dataset:
    dataset = kind.model_validate_json(settings).load()
    arrays = (getattr(dataset, name) for name in Dataset.PER_IMAGE)
    for array in arrays:
        if array is not None:
            array.flags.writeable = False  # the next who asks gets the same array
    return dataset


@functools.cache
def _undrawn(kind: type[Phantom]) -> type[Phantom]:
    return type(kind.__name__, (Undrawn, kind), {"__module__": kind.__module__})
