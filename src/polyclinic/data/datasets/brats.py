"""BraTS 2017 as Qu 2022 uses it: FLAIR slices of high-grade glioma with the whole tumour, by institution."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from PIL import Image
from pydantic import Field

from polyclinic.data.allowed_paths import safe_names
from polyclinic.data.file_source import FileSource
from polyclinic.data.fit import crop_centre
from polyclinic.data.listing import Listing
from polyclinic.data.reading import axial, load_volume, window_to_uint8
from polyclinic.data.tables import read_table
from polyclinic.errors import BadInput

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
    institutions: Path | None = Field(
        None, description="CSV with columns subject, institution; without it the collection in the subject's name"
    )

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
