"""Your own images in a folder per class."""

import re
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from polyclinic.data.allowed_paths import safe_names
from polyclinic.data.cache import files_below
from polyclinic.data.labels import natural
from polyclinic.data.listing import Listing
from polyclinic.data.reading import Reader, Slices, Window, is_image_name
from polyclinic.data.source import FileSource
from polyclinic.data.survey_folders import levels_of, some
from polyclinic.data.tables import SPLIT_NAMES
from polyclinic.errors import BadInput
from polyclinic.registry import notice_once


class Folder(FileSource):
    """Your own images: a folder per class, and a folder per split above them if you like."""

    source: Literal["folder"] = "folder"
    patient: str = Field("", description="regular expression that finds the patient in a file's name, e.g. '^(\\d+)_'")
    site: str = Field("", description="regular expression that finds the site in a file's name, e.g. '^([A-Z]+)_'")
    class_folders: Literal["auto", "upper", "lower"] = Field(
        "auto",
        description="which folders are the classes: the upper ones, or the lower ones, with the sites above them; "
        "auto: the upper ones, but a folder for each hospital is refused",
    )
    window: Window | None = Field(None, description="centre and width of DICOM or NIfTI intensities")
    slices: Slices = Field("middle", description="slices of a volume: middle, all, or a list of numbers")

    outside_files: ClassVar[bool] = True
    layout: ClassVar[str] = """
        path/benign/anything/below.png
        path/malignant/scan.dcm
    or, with splits of your own,
        path/train/benign/a.png
        path/test/malignant/b.jpg
    or, with class_folders = "lower", a folder for each hospital,
        path/Graz/benign/a.png
        path/Wien/malignant/b.jpg
    Classes are the folders' names. PNG, JPEG, TIFF, BMP, DICOM and NIfTI (.nii, .nii.gz) may be mixed."""

    def listing(self) -> Listing:
        found = [(split, label, file) for split, top in self._tops() for label, file in self._labelled(top)]
        classes = tuple(sorted({label for _, label, _ in found}, key=natural))
        if len(classes) < 2:
            raise BadInput(
                f"data.path: '{self.location}' needs at least two folders with images, one per class; "
                f"it has {len(classes)}"
            )
        number = {name: i for i, name in enumerate(classes)}
        reader = Reader(self.window, self.slices, self.max_pixels)
        items = [(*item, frame) for item in found for frame in reader.frames(item[2])]
        root = f"{self.location.as_posix()}/"
        slices = ["" if frame is None else f" slice {frame}" for _, _, _, frame in items]
        names = [item[2].as_posix().removeprefix(root) + end for item, end in zip(items, slices, strict=True)]
        return Listing(
            picture=lambda i: reader.pixels(items[i][2], items[i][3]),
            spacing=lambda i: reader.spacing(items[i][2]),
            name=lambda i: names[i],
            labels=np.array([number[label] for _, label, _, _ in items], dtype=np.int64),
            classes=classes,
            patient=self._patients([file for _, _, file, _ in items]),
            site=self._sites([file for _, _, file, _ in items]),
            split=np.array([split for split, _, _, _ in items]) if any(item[0] for item in items) else None,
            ids=np.array(names),
        )

    def _labelled(self, top: Path) -> list[tuple[str, Path]]:
        """(class, file) of every image below `top`."""
        if self.class_folders == "lower":
            return [one for hospital in _hospitals(top) for one in _classes(hospital)]
        found = _classes(top)
        if self.class_folders == "auto":
            _refuse_hospitals(top, [file for _, file in found])
        return found

    def _tops(self) -> list[tuple[str, Path]]:
        """The folders that hold the class folders, each with the split it stands for."""
        if not self.location.is_dir():
            raise BadInput(f"data.path: '{self.location}' is not a folder; source 'folder' needs a folder per class")
        inside = folders_in(self.location)
        if inside and all(folder.name.lower() in SPLIT_NAMES for folder in inside):
            return [(SPLIT_NAMES[folder.name.lower()], folder) for folder in inside]
        return [("", self.location)]

    def _patients(self, files: list[Path]) -> np.ndarray | None:
        """The patient of each file; slices of one volume are one patient's even where no pattern is given."""
        if not self.patient:
            return None if len(set(files)) == len(files) else np.array([str(file) for file in files])
        return np.array([part_of_name(file.name, self.patient, "patient") for file in files])

    def _sites(self, files: list[Path]) -> np.ndarray | None:
        if self.site:
            return safe_names([part_of_name(file.name, self.site, "site") for file in files])
        if self.class_folders != "lower":
            return None
        tops = [top for _, top in self._tops()]
        homes = [next(top for top in tops if top in file.parents) for file in files]
        return safe_names([file.relative_to(top).parts[0] for file, top in zip(files, homes, strict=True)])


def part_of_name(name: str, pattern: str, what: str) -> str:
    """The part of a file's name that the pattern's first group (or the whole pattern) finds; `what` is the setting."""
    try:
        found = re.search(pattern, name)
    except re.error as error:
        raise BadInput(f"data.{what}: '{pattern}' is not a regular expression ({error})") from None
    if found is None:
        raise BadInput(f"data.{what}: '{pattern}' finds no {what} in the file name '{name}'")
    return found.group(1) if found.groups() else found.group(0)


def folders_in(top: Path) -> list[Path]:
    """The folders in a folder, sorted, but for hidden ones."""
    return sorted(entry for entry in top.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _classes(top: Path) -> list[tuple[str, Path]]:
    """(class, file) of every image below the class folders of `top`, sorted."""
    found = {folder.name: images_below(folder) for folder in folders_in(top)}
    if empty := [name for name, files in found.items() if not files]:
        notice_once(f"data.path: no image lies in {', '.join(empty)} of '{top}', which makes no class")
    return [(name, file) for name, files in found.items() for file in files]


def _hospitals(top: Path) -> list[Path]:
    """The folders of `top`; BadInput where an image lies in one of them and in no folder of a class."""
    hospitals = folders_in(top)
    for hospital in hospitals:
        loose = [entry for entry in sorted(hospital.iterdir()) if entry.is_file() and is_image_name(entry)]
        if loose:
            raise BadInput(
                f"data.class_folders: '{loose[0]}' lies in no folder of a class; with 'lower' an image lies in "
                f"{hospital.name}/CLASS: move it there, or set data.class_folders = 'upper'"
            )
    return hospitals


def _refuse_hospitals(top: Path, files: list[Path]) -> None:
    """BadInput where the same classes lie in a folder for each hospital: a model would learn hospitals."""
    levels = levels_of(top, files)
    if levels is None or not levels.upper_are_sites:
        return
    upper = sorted({file.relative_to(top).parts[0] for file in files}, key=natural)
    lower = sorted(set(levels.labels), key=natural)
    raise BadInput(
        f"data.path: '{top}' has the folders {some(upper)}, and in these the folders {some(lower)}: if the upper ones "
        "are hospitals, set data.class_folders = 'lower'; if they are the classes, set it to 'upper'"
    )


def images_below(folder: Path) -> list[Path]:
    """Every image at any depth, sorted; other files are left alone."""
    return [file for file in map(Path, files_below(folder)) if is_image_name(file)]
