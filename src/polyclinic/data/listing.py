"""A listing of image files with their labels and columns, made before any image is read.

A source makes a listing from folder names, tables or archive headers; `preprocessing.prepare` makes it arrays
on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from polyclinic.data.reading import Reader
from polyclinic.data.tables import Table

#: the arrays of a listing that have one entry per image
PER_IMAGE = ("labels", "patient", "site", "split", "subgroup", "ids", "columns")


@dataclass(frozen=True)
class Listing:
    """N images to be read. Fields are those of `Dataset`, with functions instead of pixels.

    picture   gives the pixels of image i: uint8 [H, W] or [H, W, 3]
    mask      gives the mask of image i: [H, W], anything above zero is inside; None where there are no masks
    spacing   gives the millimetres between columns and between rows of image i; None where no file says so
    name      says what to call image i in a message, e.g. "cases.csv row 17 (scans/a.png)"
    """

    picture: Callable[[int], np.ndarray]
    name: Callable[[int], str]
    labels: np.ndarray
    classes: tuple[str, ...] = ()
    unit: str = ""
    label_range: tuple[float, float] | None = None
    mask: Callable[[int], np.ndarray] | None = None
    patient: np.ndarray | None = None
    site: np.ndarray | None = None
    split: np.ndarray | None = None
    subgroup: np.ndarray | None = None
    ids: np.ndarray | None = None
    columns: np.ndarray | None = None
    column_names: tuple[str, ...] = ()
    spacing: Callable[[int], tuple[float, float]] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: np.ndarray) -> Listing:
        """The listing of the images at `index`, in that order."""
        index = np.asarray(index, dtype=np.int64)
        picture, name, mask, spacing = self.picture, self.name, self.mask, self.spacing
        return replace(
            self,
            picture=lambda i: picture(int(index[i])),
            name=lambda i: name(int(index[i])),
            mask=None if mask is None else lambda i: mask(int(index[i])),
            spacing=None if spacing is None else lambda i: spacing(int(index[i])),
            **{key: array[index] for key, array in self.arrays().items()},
        )

    def joined(self, other: Listing) -> Listing:
        """This listing and, behind it, another with the same columns."""
        split_at = len(self)

        def of(mine: Callable[[int], Any], others: Callable[[int], Any]) -> Callable[[int], Any]:
            return lambda i: mine(i) if i < split_at else others(i - split_at)

        both: dict[str, Any] = {
            key: np.concatenate([array, getattr(other, key)]) for key, array in self.arrays().items()
        }
        mask = None if self.mask is None or other.mask is None else of(self.mask, other.mask)
        spacing = None if self.spacing is None or other.spacing is None else of(self.spacing, other.spacing)
        picture, name = of(self.picture, other.picture), of(self.name, other.name)
        return replace(self, picture=picture, name=name, mask=mask, spacing=spacing, **both)

    def arrays(self) -> dict[str, np.ndarray]:
        """The per-image arrays that there are."""
        return {key: getattr(self, key) for key in PER_IMAGE if getattr(self, key) is not None}

    def facts(self) -> dict[str, Any]:
        """What holds for all images, in plain values."""
        bounds = None if self.label_range is None else [float(bound) for bound in self.label_range]
        names = {"column_names": list(self.column_names)} if self.column_names else {}
        return {"classes": list(self.classes), "unit": self.unit, "label_range": bounds, **names}


def listing_of_files(
    files: Sequence[Path],
    names: Sequence[str],
    *,
    change: Callable[[np.ndarray], np.ndarray] = lambda pixels: pixels,
    **facts: Any,
) -> Listing:
    """A listing with one file per image; `change` is done to its pixels, `facts` are fields of `Listing`."""
    reader = Reader()
    return Listing(
        picture=lambda i: change(reader.pixels(files[i])),
        spacing=lambda i: reader.spacing(files[i]),
        name=lambda i: names[i],
        ids=np.array([file.name for file in files]),
        **facts,
    )


def listing_of_arrays(images: Sequence[np.ndarray], what: str, **facts: Any) -> Listing:
    """A listing of images [H, W] or [H, W, 3] that lie in arrays; `what` names the file or folder."""
    return Listing(picture=lambda i: images[i], name=lambda i: f"{what} image {i}", **facts)


def places(table: Table, files: Sequence[Path]) -> list[str]:
    """What to call the file of each row of a table."""
    return [f"{table.place(i)} ({file.name})" for i, file in enumerate(files)]
