"""A first look at tables: which one lists somebody's images, and what its columns mean, by their names and values."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from polyclinic.data.cache import files_below
from polyclinic.data.labels import are_labels
from polyclinic.data.reading import is_image_name
from polyclinic.data.survey_cases import Cases, Wanted
from polyclinic.data.tables import Table, read_table
from polyclinic.errors import BadInput

#: names of columns by what they hold, the likeliest first
NAMES: dict[str, tuple[str, ...]] = {
    "label": (
        *("label", "class", "diagnosis", "dx", "target", "boneage"),
        *("age", "months", "years", "grade", "score", "finding"),
    ),
    "patient": ("patient", "patient_id", "patientid", "subject", "subject_id", "case_id", "person"),
    "site": ("site", "hospital", "center", "centre", "institution", "clinic", "scanner"),
    "split": ("split", "set", "fold", "subset"),
    "mask": ("mask", "mask_path", "segmentation", "seg"),
}
#: columns that may tell patients apart, where many of their values differ; people look for the others first
LIKE_PATIENTS = ("lesion_id", "lesion", "record", "record_id", "mrn", "case", "accession", "exam_id")
#: share of a folder's images that a table in it lists, if it is theirs: another may name an image or two by accident
LISTED = 0.05
FEWEST_PATIENTS = 0.2  #: share of the rows that such a column must have different values for
MOST_SITES = 50  #: a column, or a level of folders, with more different names holds something else than hospitals

Rows = list[dict[str, str]]


def find_table(folder: Path, ignore: Path | None = None) -> Path | None:
    """The CSV in a folder that lists images, other than `ignore`; None where none does, BadInput where several do."""
    stems = _by_stem(folder)
    tables = [file for file in sorted(folder.glob("*.csv")) if ignore is None or file.resolve() != ignore.resolve()]
    counts = {file: _fit(read_table(file), folder, stems).different for file in tables}
    fewest = max(LISTED * len(set(stems.values())), max(counts.values(), default=0) / 2)
    listing = [file for file, count in counts.items() if count > fewest]
    if len(listing) > 1:
        names = ", ".join(file.name for file in listing)
        raise BadInput(f"--for {folder}: {names} all list images; name one of them, --for {listing[0]}")
    return listing[0] if listing else None


def unused_tables(folder: Path) -> str:
    """A sentence about tables in a folder that name too few of its images to be used."""
    stems = _by_stem(folder)
    fits = [(file, _fit(read_table(file), folder, stems)) for file in sorted(folder.glob("*.csv"))]
    return "".join(f"; {file.name} is not used: no column names most of these images{fit}" for file, fit in fits)


def cases_in_table(file: Path, folder: Path, wanted: Wanted = Wanted()) -> Cases:  # noqa: B008 (frozen)
    """The cases that a table lists; rows without a label, or whose image is not there, are left out with a note."""
    table, stems = read_table(file), _by_stem(folder)
    wanted.refuse_absent(file, table.columns)
    fit = _fit(table, file.parent, stems, wanted.images)
    if not wanted.images and not fit.is_enough:
        raise BadInput(
            f"--for {file}: no column names images that lie in {folder}{fit}; it has "
            f"{', '.join(table.columns)}, and one of them must hold their paths or names"
        )
    columns = {"path": fit.column, **_named_columns(table, fit.column, wanted.label)}
    sparse = [name for name in ("site", "patient") if name in columns and _is_sparse(table.column(columns[name]))]
    notes = [f"column {columns.pop(name)} is empty in most rows: not used for the {name}" for name in sparse]
    notes += like_patients_note(columns.get("patient", ""))
    if "label" not in columns and "mask" not in columns:
        raise BadInput(
            f"--for {file}: none of the columns {', '.join(table.columns)} looks like a label; name it with --label"
        )
    kept = {**columns, **_further_columns(table, columns)}
    rows = [{field: row[column] for field, column in kept.items()} for row in table.rows]
    found = [{**row, "path": path} for row, path in zip(rows, fit.paths, strict=True)]
    cases = _without_gaps(found, rows, file, columns)
    # a new table calls a column that is set aside by another name, so that no study takes it by itself
    return replace(cases, is_new=cases.is_new or bool(sparse), notes=(*notes, *cases.notes))


def _is_sparse(cells: np.ndarray) -> bool:
    return bool(np.mean(cells == "") > 0.5)


# --- the column of images -------------------------------------------------------------------------------


class Fit(NamedTuple):
    """The column most of whose cells name images, '' where none does, and the path that each cell names or ''."""

    column: str
    cells: list[str]
    paths: list[str]

    @property
    def is_enough(self) -> bool:
        return sum(map(bool, self.paths)) > len(self.paths) / 2

    @property
    def different(self) -> int:
        """Number of images that the column names; 0 where it names too few to be one of images."""
        return len(set(self.paths) - {""}) if self.is_enough else 0

    def __str__(self) -> str:
        """The rows that fit, and a cell that names no image; nothing where no cell names one."""
        if not any(self.paths):
            return ""
        gone = next((cell for cell, path in zip(self.cells, self.paths, strict=True) if not path), None)
        such = "" if gone is None else f"; such as '{gone}' is not there"
        return f" ('{self.column}' fits {sum(map(bool, self.paths))} of {len(self.paths)} rows{such})"


def _fit(table: Table, folder: Path, stems: Mapping[str, Path], column: str = "") -> Fit:
    """The best of all columns, or the one of that name."""
    fits = []
    for name in [column] if column else table.columns:
        cells = [row[name] for row in table.rows]
        fits.append(Fit(name, cells, [_path(cell, folder, stems) for cell in cells]))
    return max(fits, key=lambda fit: sum(map(bool, fit.paths)), default=Fit("", [], []))


def _by_stem(folder: Path) -> dict[str, Path]:
    """Images below a folder by their names, with and without what follows the first dot."""
    files = [file for file in map(Path, files_below(folder)) if is_image_name(file)]
    return {key: file for file in files for key in (file.name.partition(".")[0], file.name)}


def _path(cell: str, folder: Path, stems: Mapping[str, Path]) -> str:
    """The path, from `folder`, of the image that a cell names; nothing where there is none."""
    for path in (cell, cell.replace("\\", "/")):  # the second, in a table that was made on Windows
        if path and (folder / path).is_file():
            return path
    file = stems.get(path) or stems.get(Path(path).name)
    return os.path.relpath(file, folder) if file and path else ""


# --- other columns --------------------------------------------------------------------------------------


def columns_by_name(
    values: Mapping[str, np.ndarray], names: Mapping[str, Sequence[str]], near: Collection[str]
) -> dict[str, str]:
    """Columns or arrays by what they hold: those of a usual name; of the kinds in `near` also those with a usual name
    among their words, such as age_years. One institution alone, or very many, make no sites."""
    plain = {_plain(name): name for name in values}
    found = {}
    for what, usual in names.items():
        exact = [plain[name] for name in usual if name in plain]
        words = [plain[own] for name in usual if len(name) > 2 for own in plain if name in re.split(r"[_-]", own)]
        if chosen := exact or (words if what in near else []):
            found[what] = chosen[0]
    if "site" in found and not 2 <= len(set(map(str, values[found["site"]].tolist())) - {""}) <= MOST_SITES:
        del found["site"]
    rest = {name: cells for name, cells in values.items() if name not in found.values()}
    if "patient" not in found and (patients := likely_patients(rest)):
        found["patient"] = patients
    return found


def likely_patients(values: Mapping[str, np.ndarray]) -> str:
    """The column or array that may tell patients apart by its name and its values; '' where none does."""
    plain = {_plain(name): name for name in values}
    names = [plain[name] for name in LIKE_PATIENTS if name in plain]
    return next((name for name in names if _many_differ(values[name])), "")


def like_patients_note(name: str) -> list[str]:
    """A note about a column or an array that is taken for patients though it may be something else."""
    taken = f"'{name}' is taken for the patient: images that share one stay in one split"
    return [taken] if _plain(name) in LIKE_PATIENTS else []


def _plain(name: str) -> str:
    return name.strip().lower().replace(" ", "_")


def _many_differ(cells: np.ndarray) -> bool:
    different = set(cells.tolist())
    return "" not in different and len(different) >= max(2, FEWEST_PATIENTS * len(cells))


def _named_columns(table: Table, image: str, label: str = "") -> dict[str, str]:
    """Columns by what they hold; a lone column of unknown name is the label, and of label and mask one counts."""
    values = {name: table.column(name) for name in table.columns if name not in (image, label)}
    names = {what: usual for what, usual in NAMES.items() if not (label and what == "label")}
    found = ({"label": label} if label else {}) | columns_by_name(values, names, near=NAMES)
    rest = [name for name in values if name not in found.values()]
    if "label" not in found and "mask" not in found and len(rest) == 1:
        found["label"] = rest[0]
    if "label" in found and "mask" in found:
        del found["mask" if label else "label"]
    return found


def _further_columns(table: Table, columns: Mapping[str, str]) -> dict[str, str]:
    """Columns that a study may name for sub-groups, by the name they get in a new table: their own, unless it would
    mean there what they are not."""
    rest = [name for name in table.columns if name not in columns.values()]
    return {f"other_{name}" if name in ("path", *NAMES) else name: name for name in rest}


# --- rows -----------------------------------------------------------------------------------------------


def _without_gaps(found: Rows, rows: Rows, file: Path, columns: dict[str, str]) -> Cases:
    """The rows that have an image and all that `columns` names, each once, with a note about the others."""
    lost = [row["path"] for row, own in zip(rows, found, strict=True) if not own["path"]]
    kept, doubles = _without_doubles([row for row in found if row["path"]])
    notes = [
        f"{len(paths)} row{' names' if len(paths) == 1 else 's name'} {what}, such as '{paths[0]}': left out"
        for paths, what in ((lost, "no image that is there"), (doubles, "an image again"))
        if paths
    ]
    for what in [name for name in ("label", "site", "patient", "mask") if name in columns]:
        full = _with_label(kept) if what == "label" else [row for row in kept if row[what]]
        if count := len(kept) - len(full):
            gap = next(row[what] for row in kept if row not in full)
            such = f"such as '{gap}'" if gap else "an empty cell"
            notes.append(f"{count} row{'s' * (count > 1)} without {columns[what]} ({such}) left out")
        kept = full
    if not kept:
        raise BadInput(f"--for {file}: no row has an image and a value in each of {', '.join(columns.values())}")
    return Cases(file.parent, kept, tuple(kept[0]), columns, is_new=kept != rows, notes=tuple(notes))


def _without_doubles(rows: Rows) -> tuple[Rows, list[str]]:
    """Rows without those that say once more what another says, and the images of these."""
    different = {tuple(row.items()): row for row in reversed(rows)}
    doubles = [row["path"] for row in rows if different[tuple(row.items())] is not row]
    return [row for row in rows if different[tuple(row.items())] is row], doubles


def _with_label(rows: Rows) -> Rows:
    return [row for row, is_there in zip(rows, are_labels([row["label"] for row in rows]), strict=True) if is_there]
