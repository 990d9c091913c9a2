"""The RSNA Pediatric Bone Age challenge of 2017, prepared as Qu 2022 prepared it."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from polyclinic.data.file_source import FileSource
from polyclinic.data.listing import Listing, listing_of_files, places
from polyclinic.data.tables import Table, read_table

MONTHS = (0.0, 228.0)  # the challenge's range of ages
SEXES = {"true": "male", "m": "male", "false": "female", "f": "female"}


class RsnaBoneAge(FileSource):
    """Hand radiographs with bone age in months, male hands (Qu's BoneAge dataset)."""

    source: Literal["rsna-bone-age"] = "rsna-bone-age"
    size: int = Field(256, ge=16, le=1024, description="side of the square images, in pixels")
    sex: Literal["male", "female", "both"] = Field("male", description="whose hands")

    tasks: ClassVar[tuple[str, ...]] = ("regression",)
    phantom: ClassVar[str] = "hand-phantom"
    where: ClassVar[str] = (
        "The RSNA Pediatric Bone Age Machine Learning Challenge (2017), from the RSNA's challenge page or the copy "
        "'RSNA Bone Age' at Kaggle; non-commercial research."
    )
    layout: ClassVar[str] = """
        path/boneage-training-dataset.csv      columns id, boneage (months), male (True or False)
        path/boneage-training-dataset/1377.png, ...     (one more folder of the same name inside is fine)
    and, if you have the ages of the official test set, which is then used as such:
        path/boneage-test-dataset.csv          columns Case ID, Sex (M or F), boneage
        path/boneage-test-dataset/4360.png, ..."""

    def listing(self) -> Listing:
        training = self._part("boneage-training-dataset", "id", "male", "")
        if not (self.location / "boneage-test-dataset.csv").exists():
            return training
        test = read_table(self.location / "boneage-test-dataset.csv", "Case ID", "Sex")
        if "boneage" not in test.columns:  # as it is distributed: without the answers
            return training
        return training.joined(self._part("boneage-test-dataset", "Case ID", "Sex", "test"))

    def _part(self, name: str, id_column: str, sex_column: str, split: str) -> Listing:
        table = read_table(self.location / f"{name}.csv", id_column, "boneage", sex_column)
        table = table.where(self._wanted(table, sex_column))
        folder = self.location / name
        folder = folder / name if (folder / name).is_dir() else folder
        files = [folder / f"{case}.png" for case in table.column(id_column)]
        return listing_of_files(
            files,
            places(table, files),
            labels=table.numbers("boneage"),
            unit="months",
            label_range=MONTHS,
            split=np.full(len(files), split, dtype="<U10"),
        )

    def _wanted(self, table: Table, column: str) -> np.ndarray:
        sexes = np.array([SEXES.get(text.lower(), "") for text in table.column(column)])
        return np.arange(len(table)) if self.sex == "both" else np.flatnonzero(sexes == self.sex)
