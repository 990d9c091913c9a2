"""What a first look at somebody's images finds, and the sizes of a few images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from polyclinic.data.labels import Labels
from polyclinic.data.reading import Reader
from polyclinic.data.survey_tables import Cases

LOOKED_AT = 40  #: images that are opened


@dataclass(frozen=True)
class Sizes:
    """Different (width, height) of the images that were opened, by their numbers of pixels; `all`: no other image is
    there."""

    found: tuple[tuple[int, int], ...] = ()
    median: tuple[int, int] = (0, 0)
    all: bool = True

    @classmethod
    def one(cls, width: int, height: int) -> Sizes:
        return cls(((width, height),), (width, height))

    @property
    def smallest_side(self) -> int:
        return min(self.median)

    @property
    def oblong(self) -> bool:
        return any(width != height for width, height in self.found)

    def __str__(self) -> str:
        if not self.found:
            return "unknown size"
        named = [f"{width} x {height}" for width, height in self.found]
        if len(named) == 1:
            return f"{named[0]} pixels"
        return f"{len(named)} sizes{'' if self.all else ' or more'}, from {named[0]} to {named[-1]} pixels"


@dataclass(frozen=True)
class Survey:
    """What was found at `path`. `cases` lists images that no file lists yet in a way that a study can use; `columns`
    are the names of columns or arrays, by what they hold."""

    path: Path
    source: Literal["folder", "csv", "npz"]
    labels: Labels
    images: int
    sizes: Sizes
    columns: dict[str, str] = field(default_factory=dict)
    sites: dict[str, int] = field(default_factory=dict)
    patients: int | None = None  #: None where nothing says whose an image is
    patient_pattern: str = ""
    cases: Cases | None = None
    notes: tuple[str, ...] = ()
    slices: int = 1  #: of a volume
    site_pattern: str = ""
    table: Cases | None = None  #: what a CSV lists that a study can use as it is
    keeps_classes: bool = False  #: some images of an archive have no label, and the study must leave them out

    @property
    def task(self) -> str:
        return self.labels.task


def sizes_of(files: Sequence[Path]) -> Sizes:
    """The sizes of a few images, taken evenly."""
    chosen = [files[i] for i in np.unique(np.linspace(0, len(files) - 1, LOOKED_AT).astype(int))] if files else []
    shapes = []
    for file in chosen:
        try:
            shapes.append(Reader().pixels(file).shape[:2])
        except Exception:  # a broken file is named by `study check`
            continue
    if not shapes:
        return Sizes()
    height, width = np.median(shapes, axis=0)
    found = sorted({(int(width), int(height)) for height, width in shapes}, key=lambda size: (size[0] * size[1], size))
    return Sizes(tuple(found), (int(width), int(height)), all=len(chosen) == len(files))
