"""A first look at somebody's images: what lies there, of which size, with which labels. Nothing is prepared.

`survey` finds out how a folder, a table or an archive is laid out, and what can be learnt from it. It imports no torch,
and opens a few images only. A column that nobody has given is filled by the first of its rules that has an answer.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from polyclinic.data import survey_folders
from polyclinic.data.allowed_paths import safe_name
from polyclinic.data.datasets.folder import folders_in, images_below, part_of_name
from polyclinic.data.doubles import digests_of_files, said_of_doubles, several_labels, two_labels
from polyclinic.data.labels import MOST_CLASSES, Labels, code_notes, labels_of, refuse_unlearnable
from polyclinic.data.reading import is_image_name
from polyclinic.data.survey_cases import (
    MASK_FOLDER,
    Cases,
    Hints,
    Survey,
    paired_masks,
    rarest_of,
    shared_patients,
    sizes_of,
)
from polyclinic.data.survey_folders import INSTITUTIONS_NOTE
from polyclinic.data.survey_tables import cases_in_table, find_table, survey_archive, unused_tables
from polyclinic.data.tables import SPLIT_NAMES
from polyclinic.errors import BadInput

#: the parts of file names that may say who the patient is: what stands before the first _ or -
PATIENT = "^([^_-]+)[_-]"
#: images of a patient, on average, from which on that is believed: else it is a name that each file has for itself
FEWEST_OF_A_PATIENT = 1.2
FEWEST_IN_A_FOLDER = 5  #: images of a class, on average, where there are many folders; else these are patients
What = Literal["site", "patient"]


def survey(path: Path, ignore: Path | None = None, hints: Hints = Hints()) -> Survey:  # noqa: B008 (frozen)
    """The images of a folder, a CSV or an npz file; BadInput where nothing of it can be learnt from. `ignore`: a table
    that an earlier look has written."""
    path = Path(path)
    if not path.exists():
        raise BadInput(f"--for {path}: there is nothing; name the folder, the CSV or the npz file of your images")
    if path.suffix.lower() == ".npz":
        return survey_archive(path, hints)
    if path.is_file() and is_image_name(path):
        raise BadInput(f"--for {path}: is one image; name the folder of all images, or the table that lists them")
    if path.is_file():
        return _table(path, path.parent, hints)
    table = find_table(path, ignore)
    if table is not None:
        return _table(table, path, hints)
    archives = sorted(path.glob("*.npz"))
    if len(archives) == 1 and not images_below(path):
        return survey_archive(archives[0], hints)
    if hints.images or hints.columns():
        flag = "images" if hints.images else "label" if hints.label else "site-column and --patient-column"
        raise BadInput(f"--{flag}: names a column or an array; name the file with --for")
    return _folders(path)


# --- rules for columns that nobody has given ------------------------------------------------------------


class Rule(NamedTuple):
    """A column, how its values are found (None where they are not), and a note about them: {some} of {count}."""

    column: What
    find: Callable[[Cases], list[str] | None]
    note: str


INSTITUTIONS = Rule("site", lambda cases: survey_folders.institutions_of(cases.files()), INSTITUTIONS_NOTE)
HOSPITALS = Rule(
    "site",
    lambda cases: survey_folders.hospitals_of(cases.paths(), cases.column("label")),
    "the uppermost folders ({some}) are taken for the sites; if they are none, set "
    'sites.partition = "iid" and sites.count',
)
HEADERS = Rule(
    "patient",
    lambda cases: survey_folders.patients_of(cases.files(), cases.column("site")),
    "patients are those of the DICOM files",
)
PATIENT_FOLDERS = Rule(
    "patient",
    lambda cases: survey_folders.patient_folders(cases.paths(), cases.column("site")),
    "the folders {some} are taken for the patients; if they are none, give --patient REGEX",
)
IN_TABLES = (INSTITUTIONS, HOSPITALS, HEADERS)
IN_CLASSES = (INSTITUTIONS, HEADERS)


def _completed(cases: Cases, *rules: Rule) -> Cases:
    for column, find, note in rules:
        if column not in cases.fields and (found := find(cases)):
            cases = cases.with_column(
                column, found, note.format(some=survey_folders.some(found), count=len(set(found)))
            )
    return cases


def _survey(path: Path, cases: Cases, labels: Labels, patients: int | None = None) -> Survey:
    """A survey of cases. `patients`: their number, where no column names them and folders tell it."""
    files, sites, known = cases.files(), cases.column("site"), cases.column("patient")
    slices = survey_folders.slices_of(files)
    notes = [*cases.notes, *(shared_patients(known, sites) if known and sites else [])]
    columns = {what: cases.column(name) for what, name in (("class", "label"), ("site", "site"), ("split", "split"))}
    known_columns = {what: values for what, values in columns.items() if values}
    notes += said_of_doubles(digests_of_files(files), cases.paths(), known_columns)
    volumes = f"volumes of about {slices} slices: the middle slice of each is used; data.slices = 'all' takes every one"
    return Survey(
        path=path,
        source="csv",
        labels=labels,
        images=len(cases.rows),
        sizes=sizes_of(files),
        columns=cases.columns,
        sites=dict(Counter(sites or ())),
        patients=len(set(known)) if known else patients or survey_folders.count_patients(files, sites),
        table=cases,
        notes=(*notes, *([volumes] if slices > 1 else [])),
        slices=slices,
        rarest=rarest_of(cases.column("label") or [], sites) if labels.task == "classification" else 0,
    )


# --- tables and folders ---------------------------------------------------------------------------------


def _table(file: Path, folder: Path, hints: Hints) -> Survey:
    cases = _completed(cases_in_table(file, folder, hints), *IN_TABLES)
    if "mask" in cases.fields:
        return _survey(file, cases, Labels.masks())
    texts = cases.column("label") or []
    labels = labels_of(texts)
    if labels.task == "classification" and (rows := two_labels(cases.paths(), texts)):
        both = "' and '".join(texts[row] for row in rows)
        raise BadInput(f"--for {file}: '{cases.paths()[rows[0]]}' has two labels, '{both}'; remove one of the rows")
    if several := several_labels([*labels.classes]):
        raise BadInput(
            f"--for {file}: the label '{several}' names several, and one label of an image is learnt; write the one to "
            "learn into a column of its own, and name it with --label; for all of them write a study with data.several "
            "= '|' and task.name = 'multilabel'"
        )
    refuse_unlearnable(labels.classes, f"--for {file}", cases.columns["label"])
    return _survey(file, replace(cases, notes=(*cases.notes, *code_notes(texts))), labels)


def _folders(path: Path) -> Survey:
    files = images_below(path)
    if not files:
        raise BadInput(f"--for {path}: no image lies there; PNG, JPEG, TIFF, BMP, DICOM and NIfTI are read")
    pairs = paired_masks(path, files)
    if pairs is not None:
        pairs = _completed(pairs, *IN_TABLES, PATIENT_FOLDERS)
        tops = survey_folders.tops_of(pairs.paths(), pairs.column("site"))  # one for each image is a patient's
        return _survey(path, pairs, Labels.masks(), len(tops) if len(set(tops)) == len(tops) > 1 else None)
    levels = survey_folders.levels_of(path, files)
    if levels is None:
        return _classes(path, files)
    cases = replace(_listed(path, files, label=levels.labels, site=levels.sites), notes=(levels.note,))
    cases = _completed(cases, *IN_CLASSES)
    if "patient" not in cases.fields and (named := _patients_in_names(files)):
        of_site = [f"{site}/{name}" for site, name in zip(levels.sites, named, strict=True)]
        cases = cases.with_column("patient", of_site)
    return _survey(path, cases, Labels("classification", dict(Counter(levels.labels))))


def _classes(path: Path, files: list[Path]) -> Survey:
    """A folder for each class, below folders of splits where there are no others."""
    tops = folders_in(path)
    depth = 2 if tops and all(top.name.lower() in SPLIT_NAMES for top in tops) else 1
    folders = [below for top in tops for below in folders_in(top)] if depth == 2 else tops
    names = {folder.name for folder in folders}
    parts = {file: file.relative_to(path).parts for file in files}
    labels = {file: part[depth - 1] for file, part in parts.items() if len(part) > depth and part[depth - 1] in names}
    classes = Labels("classification", dict(Counter(sorted(labels.values()))))
    if len(classes.classes) < 2:
        raise BadInput(
            f"--for {path}: {len(files)} images, and nothing says what they show; put them into a folder per class, "
            f"masks into a folder beside them, or add a CSV with the columns path and label{unused_tables(path)}"
        )
    if len(classes.classes) > MOST_CLASSES and len(files) < FEWEST_IN_A_FOLDER * len(classes.classes):
        raise BadInput(
            f"--for {path}: {len(classes.classes)} folders hold {len(files)} images, so they look like patients and "
            "not like classes, and nothing says what the images show; put them into a folder per class, or add a CSV "
            "with the columns path, label and patient"
        )
    empty = sorted(names - set(classes.classes))
    notes = [f"no image lies in {', '.join(empty)}, which makes no class"] if empty else []
    masks = [name for name in classes.classes if MASK_FOLDER.search(name)]
    if masks:
        notes.append(f"'{masks[0]}' is taken for a class; if it holds masks, give them the names of their images")
    cases = replace(_listed(path, list(labels), label=list(labels.values())), notes=tuple(notes))
    completed = _completed(cases, *IN_CLASSES)
    if completed is not cases:
        if survey_folders.are_same_names(completed.column("label") or (), completed.column("site") or ()):
            raise BadInput(
                f"--for {path}: the folders are hospitals, as the InstitutionName of the DICOM files says, and nothing "
                "says what the images show; put a folder per class into each of them, or add a CSV with path and label"
            )
        return _survey(path, completed, classes)
    named = _patients_in_names(files)
    return replace(
        _survey(path, cases, classes, len(set(named)) if named else None),
        source="folder",
        table=None,
        patient_pattern=PATIENT if named else "",
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


def _patients_in_names(files: Sequence[Path]) -> list[str]:
    """The patient of each file, where several files share what stands before _ or -; else none."""
    found = [match.group(1) for file in files if (match := re.search(PATIENT, file.name))]
    groups = len(set(found))
    # a fiftieth: fewer different beginnings are words, such as "scan"
    several = groups and len(files) / groups >= FEWEST_OF_A_PATIENT and groups >= max(5, len(files) // 50)
    return found if len(found) == len(files) and several else []


# --- sites and patients out of the names of files -------------------------------------------------------


def by_name(found: Survey, what: What, pattern: str) -> Survey:
    """A survey with the sites or patients that a regular expression finds in the names of its image files: as a column
    of the cases; as the pattern itself, where a study reads the folder."""
    values = _parts(found, pattern, what)
    changed: dict[str, Any] = {"patients": len(set(values))}
    if what == "site":
        values = [safe_name(name) for name in values]
        changed = {"sites": dict(sorted(Counter(values).items()))}
    if found.table is None:
        changed[f"{what}_pattern"] = pattern
        return replace(found, **changed)
    cases = found.table.with_column(what, values)
    return replace(found, table=cases, **changed)


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
