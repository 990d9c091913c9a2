"""A first look at somebody's images: what lies there, of which size, with which labels. Nothing is prepared.

`survey` finds out how a folder, a table or an archive is laid out, and what can be learnt from it. It imports no torch,
and opens a few images only. A column that nobody has given is filled by the first of its rules that has an answer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from polyclinic.data.allowed_paths import safe_name
from polyclinic.data.datasets.folder import images_below, part_of_name
from polyclinic.data.labels import MOST_CLASSES, Labels, code_notes, labels_of
from polyclinic.data.survey_archive import survey_archive
from polyclinic.data.survey_cases import MASK_FOLDER, Cases, Survey, Wanted, paired_masks, sizes_of
from polyclinic.data.survey_folders import (
    are_same_names,
    count_patients,
    hospitals_of,
    institutions_note,
    institutions_of,
    levels_of,
    patients_in,
    patients_of,
    slices_of,
    some,
    tops_of,
)
from polyclinic.data.survey_tables import cases_in_table, find_table, unused_tables
from polyclinic.data.tables import SPLIT_NAMES
from polyclinic.errors import BadInput

#: the parts of file names that may say who the patient is: what stands before the first _ or -
PATIENT = "^([^_-]+)[_-]"
#: images of a patient, on average, from which on that is believed: else it is a name that each file has for itself
FEWEST_OF_A_PATIENT = 1.2
FEWEST_IN_A_FOLDER = 5  #: images of a class, on average, where there are many folders; else these are patients
What = Literal["site", "patient"]


def survey(path: Path, ignore: Path | None = None, *, images: str = "", label: str = "") -> Survey:
    """The images of a folder, a CSV or an npz file; BadInput where nothing of it can be learnt from. `ignore`: a table
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
    if len(archives) == 1 and not images_below(path):
        return survey_archive(archives[0], wanted)
    if wanted != Wanted():
        raise BadInput(f"--{'images' if images else 'label'}: names a column or an array; name the file with --for")
    return _folders(path)


# --- rules for columns that nobody has given ------------------------------------------------------------

#: the values of a column and a note about them, where a rule finds them
Rule = Callable[[Cases], tuple[list[str], str] | None]


def _institutions(cases: Cases) -> tuple[list[str], str] | None:
    found = institutions_of(cases.files())
    return (found, institutions_note(found)) if found else None


def _hospitals(cases: Cases) -> tuple[list[str], str] | None:
    found = hospitals_of([row["path"] for row in cases.rows], cases.column("label"))
    note = 'are taken for the sites; if they are none, set sites.partition = "iid" and sites.count'
    return (found, f"the uppermost folders ({some(found)}) {note}") if found else None


def _patients_of_headers(cases: Cases) -> tuple[list[str], str] | None:
    found = patients_of(cases.files(), cases.column("site"))
    return (found, "patients are those of the DICOM files") if found else None


def _patients_of_folders(cases: Cases) -> tuple[list[str], str] | None:
    """Visits of a patient may lie in its folder."""
    tops = tops_of([row["path"] for row in cases.rows], cases.column("site"))
    note = "are taken for the patients; if they are none, give --patient REGEX"
    return (tops, f"the folders {some(tops)} {note}") if tops and patients_in(tops) else None


IN_TABLES: tuple[tuple[What, Rule], ...] = (
    ("site", _institutions),
    ("site", _hospitals),
    ("patient", _patients_of_headers),
)
BESIDE_MASKS: tuple[tuple[What, Rule], ...] = (*IN_TABLES, ("patient", _patients_of_folders))
IN_CLASSES: tuple[tuple[What, Rule], ...] = (("site", _institutions), ("patient", _patients_of_headers))


def _completed(cases: Cases, rules: Sequence[tuple[What, Rule]]) -> Cases:
    for column, rule in rules:
        if column not in cases.fields and (found := rule(cases)):
            cases = cases.with_column(column, *found)
    return cases


def _survey(path: Path, cases: Cases, labels: Labels, patients: int | None = None) -> Survey:
    """A survey of cases. `patients`: their number, where no column names them and folders tell it."""
    files, sites, known = cases.files(), cases.column("site"), cases.column("patient")
    slices = slices_of(files)
    volumes = f"volumes of about {slices} slices: the middle slice of each is used; data.slices = 'all' takes every one"
    return Survey(
        path=path,
        source="csv",
        labels=labels,
        images=len(cases.rows),
        sizes=sizes_of(files),
        columns=cases.columns,
        sites=dict(Counter(sites or ())),
        patients=len(set(known)) if known else patients or count_patients(files, sites),
        cases=cases if cases.is_new else None,
        table=cases,
        notes=(*cases.notes, *([volumes] if slices > 1 else [])),
        slices=slices,
    )


# --- tables and folders ---------------------------------------------------------------------------------


def _table(file: Path, folder: Path, wanted: Wanted) -> Survey:
    cases = _completed(cases_in_table(file, folder, wanted), IN_TABLES)
    if cases.has_masks:
        return _survey(file, cases, Labels.masks())
    texts = cases.column("label") or []
    labels = labels_of(texts)
    if labels.task == "classification" and len(labels.classes) < 2:
        raise BadInput(f"--for {file}: every image has the {cases.columns['label']} '{texts[0]}'; name a --label")
    return _survey(file, replace(cases, notes=(*cases.notes, *code_notes(texts))), labels)


def _folders(path: Path) -> Survey:
    files = images_below(path)
    if not files:
        raise BadInput(f"--for {path}: no image lies there; PNG, JPEG, TIFF, BMP, DICOM and NIfTI are read")
    pairs = paired_masks(path, files)
    if pairs is not None:
        return _masks(path, _completed(pairs, BESIDE_MASKS))
    levels = levels_of(path, files)
    if levels is None:
        return _classes(path, files)
    cases = replace(_listed(path, files, label=levels.labels, site=levels.sites), notes=(levels.note,))
    cases = _completed(cases, IN_CLASSES)
    named = _patients_in_names(files)
    if "patient" not in cases.fields and named:
        of_site = [f"{site}/{name}" for site, name in zip(levels.sites, named, strict=True)]
        cases = cases.with_column("patient", of_site)
    return _survey(path, cases, _classes_of(levels.labels))


def _masks(path: Path, pairs: Cases) -> Survey:
    """Masks and their images; an uppermost folder for each image is a patient's."""
    tops = tops_of([row["path"] for row in pairs.rows], pairs.column("site")) or []
    return _survey(path, pairs, Labels.masks(), len(tops) if len(set(tops)) == len(tops) > 1 else None)


def _classes(path: Path, files: list[Path]) -> Survey:
    """A folder for each class, below folders of splits where there are no others."""
    tops = _folders_in(path)
    depth = 2 if tops and all(top.name.lower() in SPLIT_NAMES for top in tops) else 1
    folders = [below for top in tops for below in _folders_in(top)] if depth == 2 else tops
    names = {folder.name for folder in folders}
    parts = {file: file.relative_to(path).parts for file in files}
    labels = {file: part[depth - 1] for file, part in parts.items() if len(part) > depth and part[depth - 1] in names}
    classes = _classes_of(sorted(labels.values()))
    _refuse_no_classes(path, files, classes.classes)
    empty = sorted(names - set(classes.classes))
    notes = [f"no image lies in {', '.join(empty)}, which makes no class"] if empty else []
    masks = [name for name in classes.classes if MASK_FOLDER.search(name)]
    if masks:
        notes.append(f"'{masks[0]}' is taken for a class; if it holds masks, give them the names of their images")
    cases = replace(_listed(path, list(labels), label=list(labels.values())), notes=tuple(notes))
    completed = _completed(cases, IN_CLASSES)
    if completed is not cases:
        _refuse_sites_as_classes(path, completed)
        return _survey(path, completed, classes)
    named = _patients_in_names(files)
    return replace(
        _survey(path, cases, classes, len(set(named)) if named else None),
        source="folder",
        cases=None,
        table=None,
        patient_pattern=PATIENT if named else "",
    )


def _refuse_no_classes(path: Path, files: Sequence[Path], classes: Sequence[str] | dict[str, int]) -> None:
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


def _refuse_sites_as_classes(path: Path, cases: Cases) -> None:
    """BadInput where the folders have the names of the hospitals that their DICOM files name."""
    if are_same_names(cases.column("label") or (), cases.column("site") or ()):
        raise BadInput(
            f"--for {path}: the folders are hospitals, as the InstitutionName of the DICOM files says, and nothing "
            "says what the images show; put a folder per class into each of them, or add a CSV with path and label"
        )


def _listed(path: Path, files: Sequence[Path], **columns: list[str]) -> Cases:
    """Images with what folders say about them; also the split, where the uppermost folder of each stands for one."""
    splits = [SPLIT_NAMES.get(file.relative_to(path).parts[0].lower(), "") for file in files]
    known = {**({"split": splits} if all(splits) else {}), **columns}
    rows = [
        {"path": file.relative_to(path).as_posix(), **{name: values[i] for name, values in known.items()}}
        for i, file in enumerate(files)
    ]
    return Cases(path, rows, tuple(rows[0]))


def _classes_of(labels: Sequence[str]) -> Labels:
    return Labels("classification", dict(Counter(labels)))


def _folders_in(top: Path) -> list[Path]:
    return [entry for entry in sorted(top.iterdir()) if entry.is_dir() and not entry.name.startswith(".")]


def _patients_in_names(files: Sequence[Path]) -> list[str]:
    """The patient of each file, where several files share what stands before _ or -; else none."""
    found = [match.group(1) for file in files if (match := re.search(PATIENT, file.name))]
    groups = len(set(found))
    # a fiftieth: fewer different beginnings are words, such as "scan"
    several = groups and len(files) / groups >= FEWEST_OF_A_PATIENT and groups >= max(5, len(files) // 50)
    return found if len(found) == len(files) and several else []


# --- sites and patients out of the names of files -------------------------------------------------------


def sites_by_name(found: Survey, pattern: str) -> Survey:
    """A survey with the sites that a regular expression finds in the names of its image files."""
    sites = [safe_name(name) for name in _parts(found, pattern, "site")]
    return replace(_with_column(found, "site", sites, pattern), sites=dict(sorted(Counter(sites).items())))


def patients_by_name(found: Survey, pattern: str) -> Survey:
    """A survey with the patients that a regular expression finds in the names of its image files."""
    patients = _parts(found, pattern, "patient")
    return replace(_with_column(found, "patient", patients, pattern), patients=len(set(patients)))


def _parts(found: Survey, pattern: str, what: What) -> list[str]:
    """The part of each name that the pattern finds; of each path below the folder of the table, where names do not have
    it."""
    if found.table is None and found.source != "folder":
        raise BadInput(f"--{what}: takes it out of names of files; {found.path} has none: name an array {what} in it")
    files = images_below(found.path) if found.table is None else found.table.files()
    try:
        return [part_of_name(file.name, pattern, what) for file in files]
    except BadInput as error:
        if found.table is not None and "finds no" in str(error):
            try:
                return [part_of_name(row["path"], pattern, what) for row in found.table.rows]
            except BadInput:
                pass
        raise BadInput(str(error).replace(f"data.{what}", f"--{what}", 1)) from None


def _with_column(found: Survey, what: What, values: Sequence[str], pattern: str) -> Survey:
    """With the values as a column of the cases; with the pattern itself, where a study reads the folder."""
    if found.table is None:
        return replace(found, site_pattern=pattern) if what == "site" else replace(found, patient_pattern=pattern)
    cases = found.table.with_column(what, values)
    return replace(found, cases=cases, table=cases)
