"""A first look at somebody's images: what lies there, of which size, with which labels. Nothing is prepared.

`survey` finds out how a folder, a table or an archive is laid out, and what can be learnt from it. It imports no torch,
and opens a few images only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from polyclinic.data.cache import files_below
from polyclinic.data.reading import Reader, is_image_name
from polyclinic.data.survey_headers import cases_by_patient, middle_slices_note, slices_of
from polyclinic.data.survey_labels import Labels, are_labels, labels_of
from polyclinic.data.survey_tables import MASK_FOLDER, Cases, cases_in_table, find_table, paired_masks
from polyclinic.data.tables import SPLIT_NAMES
from polyclinic.errors import BadInput

LOOKED_AT = 40  #: images that are opened

#: the parts of file names that may say who the patient is: what stands before the first _ or -
PATIENT = "^([^_-]+)[_-]"


@dataclass(frozen=True)
class Survey:
    """What was found at `path`. `cases` lists images that no file lists yet in a way that a study can use."""

    path: Path
    source: Literal["folder", "csv", "npz"]
    labels: Labels
    images: int
    size: tuple[int, int]
    columns: dict[str, str] = field(default_factory=dict)
    sites: dict[str, int] = field(default_factory=dict)
    patients: int | None = None
    patient_pattern: str = ""
    cases: Cases | None = None
    notes: tuple[str, ...] = ()
    slices: int = 1  #: of a volume

    @property
    def task(self) -> str:
        return self.labels.task


def survey(path: Path) -> Survey:
    """What lies at a folder, a CSV or an npz file; BadInput where nothing of it can be learnt from."""
    path = Path(path)
    if not path.exists():
        raise BadInput(f"--for {path}: there is nothing; name the folder, the CSV or the npz file of your images")
    if path.suffix.lower() == ".npz":
        return _archive(path)
    if path.is_file():
        return _table(path, path.parent)
    table = find_table(path)
    if table is not None:
        return _table(table, path)
    archives = sorted(path.glob("*.npz"))
    if len(archives) == 1 and not _images(path):
        return _archive(archives[0])
    return _folders(path)


def _images(path: Path) -> list[Path]:
    return [file for file in map(Path, files_below(path)) if is_image_name(file)]


def _size(files: Sequence[Path]) -> tuple[int, int]:
    """The median width and height of a few images; (0, 0) where none can be read."""
    chosen = [files[i] for i in np.unique(np.linspace(0, len(files) - 1, LOOKED_AT).astype(int))] if files else []
    shapes = []
    for file in chosen:
        try:
            shapes.append(Reader().pixels(file).shape[:2])
        except Exception:  # a broken file is named by `study check`
            continue
    height, width = np.median(shapes, axis=0) if shapes else (0, 0)
    return int(width), int(height)


# --- tables ---------------------------------------------------------------------------------------------


def _table(file: Path, folder: Path) -> Survey:
    cases = cases_in_table(file, folder)
    found = [cases.folder / row["path"] for row in cases.rows]
    labels = labels_of([row["label"] for row in cases.rows]) if not cases.has_masks else Labels.masks()
    sites = Counter(row["site"] for row in cases.rows) if "site" in cases.fields else {}
    patients = {row["patient"] for row in cases.rows} if "patient" in cases.fields else None
    slices = slices_of(found)
    return Survey(
        path=file,
        source="csv",
        labels=labels,
        images=len(cases.rows),
        size=_size(found),
        columns=cases.columns,
        sites=dict(sites),
        patients=len(patients) if patients is not None else None,
        cases=cases if cases.is_new else None,
        notes=(*cases.notes, *([middle_slices_note(slices)] if slices > 1 else [])),
        slices=slices,
    )


# --- folders --------------------------------------------------------------------------------------------


def _folders(path: Path) -> Survey:
    inside = [entry for entry in sorted(path.iterdir()) if entry.is_dir() and not entry.name.startswith(".")]
    files = _images(path)
    if not files:
        raise BadInput(f"--for {path}: no image lies there; PNG, JPEG, TIFF, BMP, DICOM and NIfTI are read")
    pairs = paired_masks(path, files)
    if pairs is not None:
        slices = slices_of(files)
        notes = (*pairs.notes, *([middle_slices_note(slices)] if slices > 1 else []))
        size = _size(files)
        return Survey(path, "csv", Labels.masks(), len(pairs.rows), size, cases=pairs, notes=notes, slices=slices)
    if inside and all(entry.name.lower() in SPLIT_NAMES for entry in inside):
        inside = [sub for top in inside for sub in sorted(top.iterdir()) if sub.is_dir()]
    return _classes(path, inside, files)


def _classes(path: Path, folders: Sequence[Path], files: list[Path]) -> Survey:
    counts: Counter[str] = Counter()
    for folder in folders:
        counts[folder.name] += len(_images(folder))
    empty = [name for name, count in counts.items() if not count]
    classes = {name: count for name, count in counts.items() if count}
    if len(classes) < 2:
        raise BadInput(
            f"--for {path}: {len(files)} images, and nothing says what they show; put them into a folder per class, "
            "masks into a folder beside them, or add a CSV with the columns path and label"
        )
    notes = [f"no image lies in {', '.join(empty)}, which makes no class"] if empty else []
    masks = [name for name in classes if MASK_FOLDER.search(name)]
    if masks:
        notes.append(f"'{masks[0]}' is taken for a class; if it holds masks, give them the names of their images")
    labels, size = Labels("classification", classes), _size(files)
    slices = slices_of(files)
    notes += [middle_slices_note(slices)] if slices > 1 else []
    flat = all(folder.parent == path for folder in folders)  # else train, validation and test lie above the classes
    cases = cases_by_patient(path, folders, files) if flat else None
    if cases is not None:
        patients: int | None = len({row["patient"] for row in cases.rows})
        found = (*notes, *cases.notes)
        return Survey(path, "csv", labels, len(cases.rows), size, {}, {}, patients, "", cases, found, slices)
    pattern, patients = _patients(files)
    images = sum(classes.values())
    return Survey(path, "folder", labels, images, size, {}, {}, patients, pattern, None, tuple(notes), slices)


def _patients(files: Sequence[Path]) -> tuple[str, int | None]:
    """A pattern that finds patients in file names, where several files share what stands before _ or -."""
    found = [re.search(PATIENT, file.name) for file in files]
    if not all(found):
        return "", None
    groups = Counter(match.group(1) for match in found if match)
    several = len(files) / len(groups) >= 1.2 and len(groups) >= max(5, len(files) // 50)
    return (PATIENT, len(groups)) if several else ("", None)


# --- archives -------------------------------------------------------------------------------------------


def _archive(path: Path) -> Survey:
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files if not name.endswith("images")}
            name = next((name for name in archive.files if name.endswith("images")), None)
            shape = archive[name].shape if name else None
            counts = sum(len(archive[one]) for one in archive.files if one.endswith("images"))
    except (OSError, ValueError, EOFError) as error:
        raise BadInput(f"--for {path}: is no NumPy archive that can be read ({error})") from None
    if shape is None or len(shape) < 3:
        raise BadInput(f"--for {path}: has no array 'images' [N, H, W]; `polyclinic data show npz` says what is needed")
    side = shape[2:] if len(shape) == 4 and shape[1] in (1, 3) else shape[1:3]
    labels = [array for key, array in arrays.items() if key == "labels" or key.endswith("_labels")]
    notes: tuple[str, ...] = ()
    if "masks" in arrays:
        found = Labels.masks()
    elif labels:
        texts = [str(value) for array in labels for value in array.reshape(-1).tolist()]
        found, notes = labels_of(texts), _gaps(texts)
    else:
        raise BadInput(f"--for {path}: has neither labels nor masks; it has {', '.join(arrays)}")
    sites = Counter(str(site) for site in arrays["site"].tolist()) if "site" in arrays else {}
    patients = len(np.unique(arrays["patient"])) if "patient" in arrays else None
    size = (int(side[1]), int(side[0]))
    return Survey(path, "npz", found, counts, size, {}, dict(sites), patients, notes=notes)


def _gaps(texts: Sequence[str]) -> tuple[str, ...]:
    """A note about images of an archive that have no label; a study cannot leave them out."""
    gaps = [number for number, label in enumerate(are_labels(texts)) if not label]
    if not gaps:
        return ()
    count = "1 image has" if len(gaps) == 1 else f"{len(gaps)} images have"
    such = f"image {gaps[0]}: '{texts[gaps[0]]}'"
    return (f"{count} no label ({such}, counted from 0); take them out of the archive before you run the study",)
