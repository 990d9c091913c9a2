"""Radiology: RSNA bone age and BraTS 2017 (as Qu et al. 2022 has them), NIH ChestX-ray14, Montgomery and Shenzhen."""

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from PIL import Image
from pydantic import Field

from polyclinic.data.allowed_paths import safe_names
from polyclinic.data.listing import Listing, listing_of_files, places
from polyclinic.data.pixels import crop_centre
from polyclinic.data.reading import axial, load_volume, window_to_uint8
from polyclinic.data.source import FileSource, numbers
from polyclinic.data.tables import read_table
from polyclinic.errors import BadInput

# --- RSNA Pediatric Bone Age challenge, 2017 ------------------------------------------------------------------


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
        parts = [self._part("boneage-training-dataset", "id", "male")]
        official = self.location / "boneage-test-dataset.csv"
        # as it is distributed, it is without the answers
        if official.exists() and "boneage" in read_table(official, "Case ID", "Sex").columns:
            parts.append(self._part("boneage-test-dataset", "Case ID", "Sex"))
        files, names, ages = zip(*parts, strict=True)
        return listing_of_files(
            [file for some in files for file in some],
            [name for some in names for name in some],
            labels=np.concatenate(ages),
            unit="months",
            label_range=MONTHS,
            split=np.repeat(["", "test"][: len(parts)], [len(some) for some in files]).astype("<U10"),
        )

    def _part(self, name: str, id_column: str, sex_column: str) -> tuple[list[Path], list[str], np.ndarray]:
        """Files, their names in messages, and ages of the official training or test set."""
        table = read_table(self.location / f"{name}.csv", id_column, "boneage", sex_column)
        sexes = np.array([SEXES.get(text.lower(), "") for text in table.column(sex_column)])
        table = table.where(np.arange(len(table)) if self.sex == "both" else np.flatnonzero(sexes == self.sex))
        folder = self.location / name
        folder = folder / name if (folder / name).is_dir() else folder
        files = [folder / f"{case}.png" for case in table.column(id_column)]
        return files, places(table, files), numbers(table.column("boneage"), table.place, MONTHS)


# --- NIH ChestX-ray14 -----------------------------------------------------------------------------------------


NOTHING = "No Finding"


class NihChestXray(FileSource):
    """Frontal chest radiographs, one finding or not, patients kept together (NIH ChestX-ray14)."""

    source: Literal["nih-chestxray"] = "nih-chestxray"
    size: int = Field(256, ge=16, le=1024, description="side of the square images, in pixels")
    channels: Literal["auto", 1, 3] = Field(1, description="1 for grey, 3 for colour")
    finding: str = Field("Effusion", description="the finding to recognise, as the table spells it")
    against: Literal["no finding", "rest"] = Field("no finding", description="images without finding, or all others")
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


# --- Montgomery County and Shenzhen Hospital ------------------------------------------------------------------


SITES = {"Montgomery": ("MontgomerySet", "MCUCXR"), "Shenzhen": ("ChinaSet_AllFiles", "CHNCXR")}


class MontgomeryShenzhen(FileSource):
    """Chest radiographs from two hospitals, tuberculosis or not, one image per patient (FedER)."""

    source: Literal["montgomery-shenzhen"] = "montgomery-shenzhen"
    size: int = Field(256, ge=16, le=1024, description="side of the square images, in pixels")
    channels: Literal["auto", 1, 3] = Field(1, description="1 for grey, 3 for colour")

    where: ClassVar[str] = (
        "The U.S. National Library of Medicine, 'Tuberculosis chest X-ray image data sets': NLM-MontgomeryCXRSet "
        "(138 images) and NLM-ChinaCXRSet (662); free for research with citation of Jaeger et al. 2014."
    )
    layout: ClassVar[str] = """
        path/MontgomerySet/CXR_png/MCUCXR_0001_0.png, ...
        path/ChinaSet_AllFiles/CXR_png/CHNCXR_0001_0.png, ...
    The last digit is the label: 0 normal, 1 tuberculosis. One of the two folders is enough."""

    def listing(self) -> Listing:
        found = [
            (site, file)
            for site, (folder, prefix) in SITES.items()
            for file in sorted((self.location / folder / "CXR_png").glob(f"{prefix}_*.png"))
        ]
        if not found:
            raise BadInput(
                f"data.path: '{self.location}' has no MontgomerySet/CXR_png/MCUCXR_*.png and no "
                "ChinaSet_AllFiles/CXR_png/CHNCXR_*.png; see `polyclinic data show montgomery-shenzhen`"
            )
        files = [file for _, file in found]
        digits = [file.stem.rsplit("_", 1)[-1] for file in files]
        if wrong := [file.name for file, digit in zip(files, digits, strict=True) if digit not in ("0", "1")]:
            raise BadInput(f"data.path: '{wrong[0]}' should end in _0 (normal) or _1 (tuberculosis)")
        return listing_of_files(
            files,
            [file.relative_to(self.location).as_posix() for file in files],
            labels=np.array(digits).astype(np.int64),
            classes=("normal", "tuberculosis"),
            site=np.array([site for site, _ in found]),
        )


# --- BraTS 2017: FLAIR slices of high-grade glioma with the whole tumour, by institution ----------------------


RESIZED, CROPPED = 256, 224


class Brats2017(FileSource):
    """Brain MRI (FLAIR, high grade): three neighbouring axial slices as channels, mask of the whole tumour (Qu)."""

    source: Literal["brats2017"] = "brats2017"
    size: int = Field(CROPPED, ge=16, le=CROPPED, description="side of the square images, in pixels")
    channels: Literal["auto", 1, 3] = Field(3, description="3 for the slice with its neighbours")
    slices: Literal["tumour", "largest"] = Field(
        "tumour", description="every slice that shows the tumour, or of each subject the one that shows most of it"
    )
    step: int = Field(1, ge=1, description="take only every so-manieth of those slices")
    institutions: Path | None = Field(None, description="CSV of subject, institution; else the subject's collection")

    tasks: ClassVar[tuple[str, ...]] = ("segmentation",)
    phantom: ClassVar[str] = "brain-phantom"
    where: ClassVar[str] = (
        "The BraTS 2017 challenge (CBICA, University of Pennsylvania), training data, on registration; for research. "
        "Institutions were given to the authors of the paper privately: without your own table of them the three "
        "collections of the subjects' names (2013, CBICA, TCIA) are the sites."
    )
    layout: ClassVar[str] = """
        path/HGG/Brats17_TCIA_105_1/Brats17_TCIA_105_1_flair.nii.gz
        path/HGG/Brats17_TCIA_105_1/Brats17_TCIA_105_1_seg.nii.gz
    Slices are resized to 256 px and cropped to 224. A subject is a patient; it is never on both sides of a split."""

    def files(self) -> Iterable[str | Path]:
        return [*super().files(), *([self.institutions] if self.institutions else [])]

    def listing(self) -> Listing:
        subjects = sorted(folder for folder in (self.location / "HGG").glob("*") if folder.is_dir())
        if not subjects:
            raise BadInput(f"data.path: '{self.location}' has no HGG/<subject> folders; see `data show brats2017`")
        items = [(subject, k) for subject in subjects for k in self._slices(subject)]
        names = np.array([subject.name for subject, _ in items])
        return Listing(
            picture=lambda i: three_slices(_file(items[i][0], "flair"), items[i][1]),
            name=lambda i: f"{items[i][0].name} slice {items[i][1]}",
            mask=lambda i: _prepare(axial(load_volume(_file(items[i][0], "seg"))[0], items[i][1]) > 0),
            labels=np.zeros(len(items), dtype=np.int64),
            classes=("whole tumour",),
            patient=names,
            site=self._sites(names),
            ids=np.array([f"{subject.name} slice {k}" for subject, k in items]),
        )

    def _slices(self, subject: Path) -> list[int]:
        """Numbers of the slices to take; 0 for a subject that cannot be read, so that reading it says why."""
        try:
            tumour = (load_volume(_file(subject, "seg"))[0] > 0).sum(axis=(0, 1))
        except Exception:
            return [0]
        if self.slices == "largest":
            return [int(tumour.argmax())] if tumour.any() else []
        return np.flatnonzero(tumour)[:: self.step].tolist()

    def _sites(self, names: np.ndarray) -> np.ndarray:
        if self.institutions is None:
            return np.array([name.split("_")[1] if "_" in name else "unknown" for name in names])
        table = read_table(self.institutions, "subject", "institution")
        known = {row["subject"]: row["institution"] for row in table.rows}
        missing = sorted(set(names) - set(known))
        if missing:
            raise BadInput(f"{self.institutions}: there is no row for subject '{missing[0]}'; add it")
        return safe_names(known[name] for name in names)


def three_slices(file: Path, k: int) -> np.ndarray:
    """Slice k with the ones below and above it as channels, uint8 [224, 224, 3]."""
    volume, (low, high) = load_volume(file)
    last = volume.shape[2] - 1
    slices = [window_to_uint8(axial(volume, min(max(k + d, 0), last)), low, high) for d in (-1, 0, 1)]
    return _prepare(np.stack(slices, axis=2))


def _prepare(pixels: np.ndarray) -> np.ndarray:
    """Resized to 256, then cropped to the central 224."""
    mask = pixels.dtype == np.bool_
    picture = Image.fromarray(pixels.astype(np.uint8) * 255 if mask else pixels)
    resample = Image.Resampling.NEAREST if mask else Image.Resampling.BICUBIC
    return crop_centre(np.asarray(picture.resize((RESIZED, RESIZED), resample)), CROPPED)


def _file(subject: Path, what: str) -> Path:
    """Compressed or not."""
    packed = subject / f"{subject.name}_{what}.nii.gz"
    return packed if packed.exists() else packed.with_suffix("")
