"""Kaggle's Diabetic Retinopathy Detection, prepared as Qu 2022 prepared it."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from polyclinic.data.file_source import FileSource
from polyclinic.data.labels import classes_of
from polyclinic.data.listing import Listing, listing_of_files, places
from polyclinic.data.preprocessing.graham import graham
from polyclinic.data.tables import read_table


class KaggleRetinopathy(FileSource):
    """Fundus photographs, grade 0 against 2-4, left eyes, Graham's preprocessing (Qu's Retina dataset)."""

    source: Literal["kaggle-retinopathy"] = "kaggle-retinopathy"
    size: int = Field(256, ge=16, le=540, description="side of the square images, in pixels")
    eyes: Literal["left", "right", "both"] = Field("left", description="which eyes of a patient")
    grades: Literal[2, 5] = Field(2, description="2: healthy (0) against diseased (2-4), 1 left out; 5: all grades")
    per_class: int | None = Field(None, ge=1, description="so many images of each class, drawn by data.seed")
    graham: bool = Field(True, description="Graham's preprocessing; otherwise the photograph as it is")

    phantom: ClassVar[str] = "fundus-phantom"
    where: ClassVar[str] = (
        "The competition 'Diabetic Retinopathy Detection' at Kaggle (2015, images by EyePACS), files train.zip.00* "
        "and trainLabels.csv, after accepting its rules: research use only."
    )
    layout: ClassVar[str] = """
        path/trainLabels.csv      columns image (10_left), level (0-4)
        path/train/10_left.jpeg, path/train/10_right.jpeg, ..."""

    def listing(self) -> Listing:
        table = read_table(self.location / "trainLabels.csv", "image", "level")
        sides = ("left", "right") if self.eyes == "both" else (self.eyes,)
        eyes = np.array([name.endswith(sides) for name in table.column("image")])
        levels = table.column("level")
        table = table.where(np.flatnonzero(eyes & ((levels != "1") | (self.grades == 5))))
        names = table.column("image")
        files = [self.location / "train" / f"{name}.jpeg" for name in names]
        merge = {"healthy": ["0"], "diseased": [g for g in "234" if g in table.column("level")]}
        labels, classes = classes_of(table.column("level"), merge=merge if self.grades == 2 else None)
        return listing_of_files(
            files,
            places(table, files),
            change=graham if self.graham else lambda pixels: pixels,
            labels=labels,
            classes=classes,
            patient=np.array([name.split("_")[0] for name in names]),
        )
