"""Sources: the `[data]` table of a study and how its images are loaded; `at-sites`, the source of a deployed study."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator

from polyclinic.data.dataset import Dataset, Fold, PerClass
from polyclinic.errors import BadInput
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


class AtSites(Source):
    """Images that never leave their sites: each opens its own under a name that all have agreed on."""

    source: Literal["at-sites"] = "at-sites"
    dataset: str = Field("images", description="the name under which every site's own settings know its images")
    channels: Literal[1, 3] = Field(1, description="1 for grey, 3 for colour")
    classes: tuple[str, ...] = Field(("no", "yes"), description="the classes, in order; none where values are learnt")
    unit: str = Field("", description="the unit of the values to predict, such as months")
    label_range: tuple[float, float] | None = Field(None, description="smallest and largest value to predict")

    tasks: ClassVar[tuple[str, ...]] = TASKS

    def load(self) -> Dataset:
        raise BadInput(
            "data.source: 'at-sites' has no images here, each site has its own; `polyclinic deploy` runs such a study"
        )

    def info(self, sites: tuple[str, ...]) -> dict:
        """The facts that stand for `PreparedSites.info` where nobody but the sites can count."""
        return {
            "source": self.source,
            "channels": self.channels,
            "size": self.size,
            "classes": list(self.classes),
            "unit": self.unit,
            "label_range": list(self.label_range) if self.label_range else None,
            "counts": {site: {} for site in sites},
            "class_counts": {},
            "digests": {},
            "mean_ks": None,
        }
