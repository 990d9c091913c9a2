"""NIH ChestX-ray14: one finding against its absence, with the official split by patient."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from polyclinic.data.file_source import FileSource
from polyclinic.data.listing import Listing, listing_of_files, places
from polyclinic.data.tables import read_table
from polyclinic.errors import BadInput

NOTHING = "No Finding"


class NihChestXray(FileSource):
    """Frontal chest radiographs, one finding or not, patients kept together (NIH ChestX-ray14)."""

    source: Literal["nih-chestxray"] = "nih-chestxray"
    size: int = Field(256, ge=16, le=1024, description="side of the square images, in pixels")
    channels: Literal["auto", 1, 3] = Field(1, description="1 for grey, 3 for colour")
    finding: str = Field("Effusion", description="the finding to recognise, as the table spells it")
    against: Literal["no finding", "rest"] = Field(
        "no finding", description="compare with images without any finding, or with all others"
    )
    view: Literal["PA", "AP", "both"] = Field("both", description="view position")

    where: ClassVar[str] = (
        "The NIH Clinical Center, 'ChestXray-NIHCC' (Wang et al. 2017): images_001 to images_012 and the tables; "
        "free use with citation and a link to the NIH download site."
    )
    layout: ClassVar[str] = """
        path/Data_Entry_2017.csv (or Data_Entry_2017_v2020.csv)   Image Index, Finding Labels, Patient ID, ...
        path/images_001/images/00000001_000.png, ... up to images_012   (or all in path/images/)
        path/train_val_list.txt, path/test_list.txt   the official split, used where both are there"""

    def listing(self) -> Listing:
        tables = sorted(self.location.glob("Data_Entry_2017*.csv"))
        if not tables:
            raise BadInput(f"data.path: '{self.location}' has no Data_Entry_2017.csv; see `data show nih-chestxray`")
        table = read_table(tables[0], "Image Index", "Finding Labels", "Patient ID", "View Position")
        found = [text.split("|") for text in table.column("Finding Labels")]
        ill = np.array([self.finding in names for names in found])
        if not ill.any():
            known = sorted({name for names in found for name in names} - {NOTHING})
            raise BadInput(f"data.finding: no image has '{self.finding}'; there are {', '.join(known)}")
        well = ~ill if self.against == "rest" else np.array([names == [NOTHING] for names in found])
        seen = (table.column("View Position") == self.view) | (self.view == "both")
        chosen = np.flatnonzero((ill | well) & seen)
        table = table.where(chosen)
        names = table.column("Image Index")
        files = self._files(names)
        return listing_of_files(
            files,
            places(table, files),
            labels=ill[chosen].astype(np.int64),
            classes=("no finding" if self.against == "no finding" else "other", self.finding.lower()),
            patient=table.column("Patient ID"),
            split=self._official_split(names),
        )

    def _files(self, names: np.ndarray) -> list[Path]:
        folders = [self.location / "images", *sorted(self.location.glob("images_*/images"))]
        where = {file.name: file for folder in folders if folder.is_dir() for file in folder.iterdir()}
        return [where.get(name, self.location / "images" / name) for name in names]

    def _official_split(self, names: np.ndarray) -> np.ndarray | None:
        lists = {split: self.location / f"{split}_list.txt" for split in ("train_val", "test")}
        if not all(file.is_file() for file in lists.values()):
            return None
        test = set(lists["test"].read_text().split())
        return np.array(["test" if name in test else "train" for name in names])
