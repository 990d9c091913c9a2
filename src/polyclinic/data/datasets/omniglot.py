"""Omniglot: characters of fifty alphabets."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from polyclinic.data.file_source import FileSource
from polyclinic.data.listing import Listing, listing_of_files
from polyclinic.data.names import safe_names
from polyclinic.errors import BadInput

SETS = ("images_background", "images_evaluation", "images_background_small1", "images_background_small2")


class Omniglot(FileSource):
    """Handwritten characters of fifty alphabets, each drawn by twenty people; sites are alphabets (DLG)."""

    source: Literal["omniglot"] = "omniglot"
    size: int = Field(28, ge=16, le=1024, description="side of the square images, in pixels")
    channels: Literal["auto", 1, 3] = Field(1, description="1 for grey, 3 for colour")
    labels: Literal["character", "alphabet"] = Field("character", description="what to recognise")

    where: ClassVar[str] = "The repository brendenlake/omniglot (Lake et al. 2015), folder python; MIT."
    layout: ClassVar[str] = """
        path/images_background/Greek/character01/0394_01.png, ...
        path/images_evaluation/Tengwar/character01/1600_01.png, ...
    Any of images_background, images_evaluation, images_background_small1, images_background_small2."""

    def listing(self) -> Listing:
        files = [file for name in SETS for file in sorted((self.location / name).glob("*/character*/*.png"))]
        if not files:
            raise BadInput(f"data.path: '{self.location}' has no images_background/<alphabet>/character*/*.png")
        alphabets = [file.parent.parent.name for file in files]
        kinds = [_kind(file) for file in files] if self.labels == "character" else alphabets
        classes = tuple(sorted(set(kinds)))
        number = {name: i for i, name in enumerate(classes)}
        return listing_of_files(
            files,
            [file.relative_to(self.location).as_posix() for file in files],
            labels=np.array([number[kind] for kind in kinds], dtype=np.int64),
            classes=classes,
            site=safe_names(alphabets),
        )


def _kind(file: Path) -> str:
    return f"{file.parent.parent.name}/{file.parent.name}"
