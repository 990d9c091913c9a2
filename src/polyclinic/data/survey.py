"""A first look at somebody's images: what lies there, of which size, with which labels. Nothing is prepared.

`survey` finds out how a folder, a table or an archive is laid out, and what can be learnt from it. It imports no torch,
and opens a few images only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from polyclinic.data.cache import files_below
from polyclinic.data.labels import MOST_CLASSES, Labels, code_notes, labels_of
from polyclinic.data.reading import is_dicom, is_image_name
from polyclinic.data.survey_archive import survey_archive
from polyclinic.data.survey_folders import (
    Levels,
    are_same_names,
    hospitals_note,
    hospitals_of,
    levels_of,
    patients_in,
    patients_note,
    tops_of,
)
from polyclinic.data.survey_headers import (
    count_patients,
    institutions_note,
    institutions_of,
    middle_slices_note,
    patients_of,
    slices_of,
)
from polyclinic.data.survey_result import Survey, sizes_of
from polyclinic.data.survey_tables import (
    MASK_FOLDER,
    Cases,
    Wanted,
    cases_in_table,
    find_table,
    paired_masks,
    unused_tables,
)
from polyclinic.data.tables import SPLIT_NAMES
from polyclinic.errors import BadInput

#: the parts of file names that may say who the patient is: what stands before the first _ or -
PATIENT = "^([^_-]+)[_-]"
DICOM_PATIENTS = "patients are those of the DICOM files"
FEWEST_IN_A_FOLDER = 5  #: images of a class, on average, where there are many folders


def survey(path: Path, ignore: Path | None = None, *, images: str = "", label: str = "") -> Survey:
    """What lies at a folder, a CSV or an npz file; BadInput where nothing of it can be learnt from. `ignore`: a table
    that an earlier look has written. `images` and `label` name columns or arrays."""
    path, wanted = Path(path), Wanted(images, label)
    if not path.exists():
        raise BadInput(f"--for {path}: there is nothing; name the folder, the CSV or the npz file of your images")
    if path.suffix.lower() == ".npz":
        return survey_archive(path, wanted)
    if path.is_file():
        return _table(path, path.parent, wanted)
    table = find_table(path, ignore)
    if table is not None:
        return _table(table, path, wanted)
    archives = sorted(path.glob("*.npz"))
    if len(archives) == 1 and not _images(path):
        return survey_archive(archives[0], wanted)
    if wanted != Wanted():
        raise BadInput(f"--{'images' if images else 'label'}: names a column or an array; name the file with --for")
    return _folders(path)


def _images(path: Path) -> list[Path]:
    return [file for file in map(Path, files_below(path)) if is_image_name(file)]


# --- tables ---------------------------------------------------------------------------------------------


def _table(file: Path, folder: Path, wanted: Wanted) -> Survey:
    cases = _with_patients(_with_sites(cases_in_table(file, folder, wanted)))
    found = cases.files()
    texts = [row["label"] for row in cases.rows] if not cases.has_masks else []
    labels = labels_of(texts) if texts else Labels.masks()
    if labels.task == "classification" and len(labels.classes) < 2:
        raise BadInput(f"--for {file}: every image has the {cases.columns['label']} '{texts[0]}'; name a --label")
    sites = Counter(cases.column("site") or ())
    own = cases.column("patient")
    patients = len(set(own)) if own else count_patients(found, cases.column("site"))
    slices = slices_of(found)
    return Survey(
        path=file,
        source="csv",
        labels=labels,
        images=len(cases.rows),
        sizes=sizes_of(found),
        columns=cases.columns,
        sites=dict(sites),
        patients=patients,
        cases=cases if cases.is_new else None,
        table=cases,
        notes=(*cases.notes, *code_notes(texts), *([middle_slices_note(slices)] if slices > 1 else [])),
        slices=slices,
    )


def _with_sites(cases: Cases) -> Cases:
    """A table that names no sites with those that its DICOM files name, or the uppermost folders of its paths."""
    if "site" in cases.fields:
        return cases
    if institutions := institutions_of(cases.files()):
        return _with_column(cases, "site", institutions, institutions_note(len(set(institutions))))
    labels = None if cases.has_masks else [row["label"] for row in cases.rows]
    hospitals = hospitals_of([row["path"] for row in cases.rows], labels)
    return _with_column(cases, "site", hospitals, hospitals_note(hospitals)) if hospitals else cases


def _with_patients(cases: Cases) -> Cases:
    """A table that names no patients with those that its DICOM files name, where they do."""
    patients = None if "patient" in cases.fields else patients_of(cases.files(), cases.column("site"))
    return _with_column(cases, "patient", patients, DICOM_PATIENTS) if patients else cases


def _with_column(cases: Cases, name: str, values: Sequence[str], note: str) -> Cases:
    rows = [{**row, name: value} for row, value in zip(cases.rows, values, strict=True)]
    return replace(cases, rows=rows, fields=tuple(rows[0]), is_new=True, notes=(*cases.notes, note))


# --- folders --------------------------------------------------------------------------------------------


def _folders(path: Path) -> Survey:
    inside = [entry for entry in sorted(path.iterdir()) if entry.is_dir() and not entry.name.startswith(".")]
    files = _images(path)
    if not files:
        raise BadInput(f"--for {path}: no image lies there; PNG, JPEG, TIFF, BMP, DICOM and NIfTI are read")
    pairs = paired_masks(path, files)
    if pairs is not None:
        return _masks(path, _with_patient_folders(_with_patients(_with_sites(pairs))))
    if inside and all(entry.name.lower() in SPLIT_NAMES for entry in inside):
        inside = [sub for top in inside for sub in sorted(top.iterdir()) if sub.is_dir()]
    levels = levels_of(path, files)
    return _sites_and_classes(path, files, levels) if levels else _classes(path, inside, files)


def _masks(path: Path, pairs: Cases) -> Survey:
    files = pairs.files()
    slices = slices_of(files)
    return Survey(
        path=path,
        source="csv",
        labels=Labels.masks(),
        images=len(pairs.rows),
        sizes=sizes_of(files),
        sites=dict(Counter(row["site"] for row in pairs.rows)) if "site" in pairs.fields else {},
        patients=len({row["patient"] for row in pairs.rows}) if "patient" in pairs.fields else _alone(pairs),
        cases=pairs,
        notes=(*pairs.notes, *([middle_slices_note(slices)] if slices > 1 else [])),
        slices=slices,
    )


def _tops(cases: Cases) -> list[str] | None:
    return tops_of([row["path"] for row in cases.rows], cases.column("site"))


def _with_patient_folders(cases: Cases) -> Cases:
    """Cases that name no patients with those that their folders name, where they do; visits may lie in these."""
    tops = None if "patient" in cases.fields else _tops(cases)
    return _with_column(cases, "patient", tops, patients_note(tops)) if tops and patients_in(tops) else cases


def _alone(cases: Cases) -> int | None:
    """How many patients there are: those of DICOM files, or an uppermost folder for each image; None where neither
    says it."""
    tops = _tops(cases) or []
    return len(tops) if len(set(tops)) == len(tops) > 1 else count_patients(cases.files(), cases.column("site"))


def _sites_and_classes(path: Path, files: list[Path], levels: Levels) -> Survey:
    """Folders that say both where an image was taken and what it shows."""
    named = _patients(files)[0]
    found = [f"{site}/{_patient(file, named)}" for site, file in zip(levels.sites, files, strict=True)]
    patients = patients_of(files, levels.sites) or (found if named else None)
    return _listed(path, files, {"label": levels.labels, "site": levels.sites, "patient": patients}, [levels.note])


def _classes(path: Path, folders: Sequence[Path], files: list[Path]) -> Survey:
    counts: Counter[str] = Counter()
    for folder in folders:
        counts[folder.name] += len(_images(folder))
    empty = [name for name, count in counts.items() if not count]
    classes = {name: count for name, count in counts.items() if count}
    if len(classes) < 2:
        raise BadInput(
            f"--for {path}: {len(files)} images, and nothing says what they show; put them into a folder per class, "
            f"masks into a folder beside them, or add a CSV with the columns path and label{unused_tables(path)}"
        )
    if len(classes) > MOST_CLASSES and len(files) < FEWEST_IN_A_FOLDER * len(classes):
        raise BadInput(
            f"--for {path}: {len(classes)} folders hold {len(files)} images, so they look like patients and not like "
            "classes, and nothing says what the images show; put them into a folder per class, or add a CSV with the "
            "columns path, label and patient"
        )
    notes = [f"no image lies in {', '.join(empty)}, which makes no class"] if empty else []
    masks = [name for name in classes if MASK_FOLDER.search(name)]
    if masks:
        notes.append(f"'{masks[0]}' is taken for a class; if it holds masks, give them the names of their images")
    inside = {file: folder.name for folder in folders for file in files if file.is_relative_to(folder)}
    institutions = institutions_of(list(inside))
    patients = patients_of(list(inside), institutions)
    if patients or institutions:
        _refuse_sites_as_classes(path, list(inside.values()), institutions)
        columns = {"label": list(inside.values()), "site": institutions, "patient": patients}
        notes += [institutions_note(len(set(institutions)))] if institutions else []
        return _listed(path, list(inside), columns, notes)
    slices = slices_of(files)
    notes += [middle_slices_note(slices)] if slices > 1 else []
    pattern, count = _patients(files)
    labels, images = Labels("classification", classes), sum(classes.values())
    return Survey(path, "folder", labels, images, sizes_of(files), {}, {}, count, pattern, None, tuple(notes), slices)


def _refuse_sites_as_classes(path: Path, labels: Sequence[str], institutions: Sequence[str] | None) -> None:
    """BadInput where the folders have the names of the hospitals that their DICOM files name."""
    if institutions and are_same_names(labels, institutions):
        raise BadInput(
            f"--for {path}: the folders are hospitals, as the InstitutionName of the DICOM files says, and nothing "
            "says what the images show; put a folder per class into each of them, or add a CSV with path and label"
        )


def _listed(path: Path, files: list[Path], columns: dict[str, list[str] | None], notes: list[str]) -> Survey:
    """Images with what folders and headers say about them, as cases to be written to a table."""
    known = {name: values for name, values in {"split": _splits(path, files), **columns}.items() if values is not None}
    rows = [
        {"path": file.relative_to(path).as_posix(), **{name: values[i] for name, values in known.items()}}
        for i, file in enumerate(files)
    ]
    if "patient" in known and is_dicom(files[0]):
        notes = [*notes, DICOM_PATIENTS]
    slices = slices_of(files)
    return Survey(
        path=path,
        source="csv",
        labels=Labels("classification", dict(Counter(known["label"]))),
        images=len(files),
        sizes=sizes_of(files),
        sites=dict(Counter(known.get("site", []))),
        patients=len(set(known["patient"])) if "patient" in known else count_patients(files, known.get("site")),
        cases=Cases(path, rows, tuple(rows[0])),
        notes=(*notes, *([middle_slices_note(slices)] if slices > 1 else [])),
        slices=slices,
    )


def _splits(path: Path, files: Sequence[Path]) -> list[str] | None:
    """The split that the uppermost folder of each file stands for; None where one stands for none."""
    found = [SPLIT_NAMES.get(file.relative_to(path).parts[0].lower()) for file in files]
    return [split for split in found if split] if all(found) else None


def _patient(file: Path, pattern: str) -> str:
    match = re.search(pattern, file.name) if pattern else None
    return match.group(1) if match else ""


def _patients(files: Sequence[Path]) -> tuple[str, int | None]:
    """A pattern that finds patients in file names, where several files share what stands before _ or -."""
    found = [re.search(PATIENT, file.name) for file in files]
    if not all(found):
        return "", None
    groups = Counter(match.group(1) for match in found if match)
    several = len(files) / len(groups) >= 1.2 and len(groups) >= max(5, len(files) // 50)
    return (PATIENT, len(groups)) if several else ("", None)
