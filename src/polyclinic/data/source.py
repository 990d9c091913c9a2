"""A source: the `[data]` table of a study, and how its images are loaded."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np
from pydantic import Field, field_validator

from polyclinic.data.balanced_test import PerClass
from polyclinic.data.dataset import Dataset
from polyclinic.data.splits import Fold
from polyclinic.settings import Settings

TASKS = ("classification", "regression", "segmentation")


class Source(Settings):
    """One subclass per source, in one file of `data/datasets/`, with its own settings as fields."""

    source: str = Field(description="where the images come from; `polyclinic data list` names all sources")
    size: int = Field(64, ge=16, le=1024, description="side of the square images, in pixels")
    validation: float = Field(0.15, ge=0, lt=1, description="share of the images held out for model selection")
    test: float = Field(0.2, gt=0, lt=1, description="share of the images held out for testing")
    fold: str | None = Field(
        None,
        description="cross-validation: 2/5 tests on the second of five folds, instead of on the share `test`; patients "
        "stay together, and every institution's images are in all folds",
    )
    test_per_class: PerClass | None = Field(
        None,
        description="test images of each class at every site: a number, or equal for as many as the site has of its "
        "rarest class; the other test images are left out of the study",
    )
    test_total_per_class: int | None = Field(
        None,
        ge=1,
        description="test images of each class, of all sites together; the other test images are left out of the study",
    )
    acquisition: float = Field(
        0.0,
        ge=0,
        le=1,
        description="how much the sites' cameras are made to differ: contrast, colour, blur, noise, vignette, crop",
    )
    seed: int = Field(0, ge=0, description="seed of the split and of the partition, apart from the study's seed")

    #: tasks this source has labels for; checked against `[task]` before anything is loaded
    tasks: ClassVar[tuple[str, ...]] = ("classification",)

    @field_validator("fold")
    @classmethod
    def _fold(cls, text: str | None) -> str | None:
        return None if text is None else str(Fold.parse(text))

    @field_validator("test_per_class", mode="before")
    @classmethod
    def _per_class(cls, value: object) -> object:
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if value is not None and not whole and value != "equal":
            raise ValueError("must be a whole number of 1 or more, or equal")
        return value

    @abstractmethod
    def load(self) -> Dataset:
        """Every image of the source, prepared at `size`."""

    def load_shared(self) -> Dataset:
        """As `load`, for whoever changes nothing in it: a source may give the same arrays more than once."""
        return self.load()

    def without_pixels(self) -> Dataset:
        """The same images with black pixels: for whoever counts them. A source may do this without reading one."""
        return self.load()


def black_images(count: int, channels: int, size: int) -> np.ndarray:
    """uint8 [count, channels, size, size], without the memory of so many."""
    return np.broadcast_to(np.zeros((1, 1, 1, 1), dtype=np.uint8), (count, channels, size, size))
