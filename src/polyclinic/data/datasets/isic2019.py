"""ISIC 2019 as FedER uses it: melanoma or not, from three collections."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from polyclinic.data.file_source import FileSource
from polyclinic.data.listing import Listing, listing_of_files, places
from polyclinic.data.tables import read_table
from polyclinic.errors import BadInput

DIAGNOSES = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
COLLECTIONS = ("BCN", "HAM", "MSK4")


class Isic2019(FileSource):
    """Dermoscopy from three collections (BCN, HAM, MSK4), melanoma or not; sites are the collections (FedER)."""

    source: Literal["isic2019"] = "isic2019"
    size: int = Field(256, ge=16, le=1024, description="side of the square images, in pixels")
    labels: Literal["melanoma", "diagnosis"] = Field("melanoma", description="melanoma or not, or all 8 diagnoses")
    channels: Literal["auto", 1, 3] = Field(3, description="1 for grey, 3 for colour")

    phantom: ClassVar[str] = "skin-phantom"
    where: ClassVar[str] = (
        "The ISIC Challenge 2019 (training input, ground truth and metadata), from the ISIC challenge data page; "
        "CC BY-NC 4.0."
    )
    layout: ClassVar[str] = """
        path/ISIC_2019_Training_GroundTruth.csv    columns image, MEL, NV, BCC, AK, BKL, DF, VASC, SCC
        path/ISIC_2019_Training_Metadata.csv       columns image, lesion_id (BCN_..., HAM_..., MSK4_...)
        path/ISIC_2019_Training_Input/ISIC_0000000.jpg, ...
    The collection is the beginning of lesion_id; images without one are left out. Splits keep lesions together."""

    def listing(self) -> Listing:
        truth = read_table(self.location / "ISIC_2019_Training_GroundTruth.csv", "image", *DIAGNOSES)
        metadata = read_table(self.location / "ISIC_2019_Training_Metadata.csv", "image", "lesion_id")
        lesions = {row["image"]: row["lesion_id"] for row in metadata.rows}
        lesion = np.array([lesions.get(name, "") for name in truth.column("image")])
        collection = np.array([name.split("_")[0] for name in lesion])
        known = np.flatnonzero(np.isin(collection, COLLECTIONS))
        if not len(known):
            raise BadInput(f"{metadata.file}: no lesion_id begins with {', '.join(COLLECTIONS)}; is it the 2019 table?")
        truth = truth.where(known)
        diagnosis = np.stack([truth.numbers(name) for name in DIAGNOSES], axis=1).argmax(axis=1)
        melanoma = self.labels == "melanoma"
        files = [self.location / "ISIC_2019_Training_Input" / f"{name}.jpg" for name in truth.column("image")]
        return listing_of_files(
            files,
            places(truth, files),
            labels=(diagnosis == 0).astype(np.int64) if melanoma else diagnosis,
            classes=("other", "melanoma") if melanoma else DIAGNOSES,
            subgroup=np.array(DIAGNOSES)[diagnosis],
            patient=lesion[known],
            site=collection[known],
        )
