"""What phantoms have in common: so many images, each drawn from its own address."""

from __future__ import annotations

import functools
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


@functools.cache
def _undrawn(kind: type[Phantom]) -> type[Phantom]:
    return type(kind.__name__, (Undrawn, kind), {"__module__": kind.__module__})
