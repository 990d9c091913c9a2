"""A dataset in memory: images with labels, masks, patients and other columns, as arrays."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np


@dataclass(frozen=True)
class Dataset:
    """N images with their labels. Per-image arrays have length N or are None.

    images    uint8 [N, C, H, W], an array or a memory map; C is 1 or 3
    labels    int64 [N] class indices, or float32 [N] values for regression
    classes   names of the classes, empty for regression
    unit      unit of a regression label, e.g. "months"
    label_range  public lower and upper bound of a regression label
    masks     uint8 [N, H, W] of 0/1 for segmentation
    patient   any dtype [N]; images of one patient never lie on both sides of a split
    site      str [N], the institution an image comes from
    split     str [N], "train" / "validation" / "test" where the source fixes it, "" where it does not
    subgroup  str [N], a finer label inside a class (e.g. the lesion type inside "malignant")
    ids       str [N], a name a human can find the image by
    columns   str [N, K], more of each image, such as sex or scanner, for results by sub-group
    geometry  float32 [N, 4]: width and height in pixels, as the files have them, and millimetres between columns and
              rows, NaN where nobody says
    column_names  names of the K columns
    """

    images: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...] = ()
    unit: str = ""
    label_range: tuple[float, float] | None = None
    masks: np.ndarray | None = None
    patient: np.ndarray | None = None
    site: np.ndarray | None = None
    split: np.ndarray | None = None
    subgroup: np.ndarray | None = None
    ids: np.ndarray | None = None
    columns: np.ndarray | None = None
    geometry: np.ndarray | None = None
    column_names: tuple[str, ...] = ()

    PER_IMAGE = ("images", "labels", "masks", "patient", "site", "split", "subgroup", "ids", "columns", "geometry")

    def __post_init__(self) -> None:
        for name in self.PER_IMAGE:
            array = getattr(self, name)
            if array is not None and len(array) != len(self.images):
                raise ValueError(f"{name} has {len(array)} entries for {len(self.images)} images")
        if self.images.dtype != np.uint8 or self.images.ndim != 4:
            raise ValueError(f"images must be uint8 [N, C, H, W], not {self.images.dtype} {self.images.shape}")

    def __len__(self) -> int:
        return len(self.images)

    def take(self, index: np.ndarray) -> Dataset:
        """The images at `index`, in that order."""
        chosen = {f.name: getattr(self, f.name) for f in fields(self) if f.name in self.PER_IMAGE}
        return replace(self, **{name: array[index] for name, array in chosen.items() if array is not None})
