"""A source of images without content, for benchmarks that need many of them at once: bytes drawn at random."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from polyclinic import Dataset, Source


class NoiseImages(Source):
    """Random bytes in two classes."""

    source: Literal["noise-images"] = "noise-images"
    samples: int = Field(1000, ge=10, description="number of images")

    def load(self) -> Dataset:
        rng = np.random.default_rng(self.seed)
        images = rng.integers(0, 256, (self.samples, 3, self.size, self.size), dtype=np.uint8)
        return Dataset(images, np.arange(self.samples) % 2, classes=("left", "right"))


SOURCES = {"noise-images": NoiseImages}
