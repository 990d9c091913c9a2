"""HAM10000 as FELICIA uses it: the four most frequent lesions, two benign and two malignant."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from polyclinic.data.file_source import FileSource
from polyclinic.data.listing import Listing, listing_of_files, places
from polyclinic.data.names import safe_names
from polyclinic.data.tables import Table, read_table
from polyclinic.errors import BadInput

#: FELICIA's lesions 0 to 3: class and name of each diagnosis
LESIONS = {
    "nv": ("benign", "melanocytic nevi"),
    "mel": ("malignant", "melanoma"),
    "bkl": ("benign", "benign keratosis"),
    "bcc": ("malignant", "basal cell carcinoma"),
}
CLASSES = ("benign", "malignant")


class Ham10000(FileSource):
    """Dermoscopy of four lesions, benign or malignant, with the lesion as sub-group (FELICIA)."""

    source: Literal["ham10000"] = "ham10000"
    channels: Literal["auto", 1, 3] = Field(3, description="1 for grey, 3 for colour")

    phantom: ClassVar[str] = "skin-phantom"
    where: ClassVar[str] = (
        "HAM10000 (Tschandl et al. 2018) at the Harvard Dataverse, or the copy 'Skin Cancer MNIST: HAM10000' at "
        "Kaggle; CC BY-NC 4.0."
    )
    layout: ClassVar[str] = """
        path/HAM10000_metadata.csv (or without .csv)     columns lesion_id, image_id, dx, optionally dataset
        path/HAM10000_images_part_1/ISIC_0024306.jpg, ...
        path/HAM10000_images_part_2/ISIC_0029306.jpg, ...
    Only nv, mel, bkl and bcc are used. Splits keep images of one lesion together; `dataset`, if there, is the site."""

    def listing(self) -> Listing:
        table = self._table()
        table = table.where(np.flatnonzero(np.isin(table.column("dx"), list(LESIONS))))
        kinds = [LESIONS[dx] for dx in table.column("dx")]
        folders = {file.stem: file for file in sorted(self.location.glob("HAM10000_images*/*.jpg"))}
        first = self.location / "HAM10000_images_part_1"
        files = [folders.get(name, first / f"{name}.jpg") for name in table.column("image_id")]
        sites = safe_names(table.column("dataset")) if "dataset" in table.columns else None
        return listing_of_files(
            files,
            places(table, files),
            labels=np.array([CLASSES.index(kind) for kind, _ in kinds], dtype=np.int64),
            classes=CLASSES,
            subgroup=np.array([name for _, name in kinds]),
            patient=table.column("lesion_id"),
            site=sites,
        )

    def _table(self) -> Table:
        for name in ("HAM10000_metadata.csv", "HAM10000_metadata"):
            if (self.location / name).is_file():
                return read_table(self.location / name, "lesion_id", "image_id", "dx")
        raise BadInput(f"data.path: '{self.location}' has no HAM10000_metadata.csv; see `data show ham10000`")
