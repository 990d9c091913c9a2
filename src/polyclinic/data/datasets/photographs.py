"""Photographs of skin and eyes: HAM10000 (FELICIA), ISIC 2019 (FedER), Kaggle's retinopathy (Qu et al. 2022)."""

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from polyclinic.data.allowed_paths import safe_names
from polyclinic.data.labels import classes_of
from polyclinic.data.listing import Listing, listing_of_files, places
from polyclinic.data.pixels import graham
from polyclinic.data.source import FileSource, numbers
from polyclinic.data.tables import Table, read_table
from polyclinic.errors import BadInput

# --- HAM10000: four lesions, two benign and two malignant -----------------------------------------------------


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


# --- ISIC 2019: melanoma or not, from three collections -------------------------------------------------------


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
        columns = [numbers(truth.column(name), truth.place, (0, 1)) for name in DIAGNOSES]
        diagnosis = np.stack(columns, axis=1).argmax(axis=1)
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


# --- Kaggle's Diabetic Retinopathy Detection ------------------------------------------------------------------


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
