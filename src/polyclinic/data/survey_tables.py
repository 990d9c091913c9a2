"""Which table lists somebody's images, what its columns mean, and which masks belong to which images.

Where no table is fit to be used as it is, `Cases` holds the rows of one to be written.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from polyclinic.data.cache import files_below
from polyclinic.data.labels import are_labels
from polyclinic.data.reading import is_image_name
from polyclinic.data.tables import Table, read_table
from polyclinic.errors import BadInput
from polyclinic.settings import nearest

#: folders and endings of names that say that a file is a mask
MASK_FOLDER = re.compile(
    r"^(masks?|seg|segs|segmentations?|annotations?|contours?|labels?tr|labels|gt|ground_?truth)$", re.I
)
MASK_ENDING = re.compile(r"(^|[_-])(mask|seg|segmentation|label|gt)$", re.I)
#: folders that say that images lie in them, and nothing else
IMAGE_FOLDER = re.compile(r"^(images?(tr)?|imgs?|scans?|data)$", re.I)
#: names of columns by what they hold, the likeliest first
NAMES = {
    "label": (
        "label",
        "class",
        "diagnosis",
        "dx",
        "target",
        "boneage",
        "age",
        "months",
        "years",
        "grade",
        "score",
        "finding",
    ),
    "patient": ("patient", "patient_id", "patientid", "subject", "subject_id", "case_id", "person"),
    "site": ("site", "hospital", "center", "centre", "institution", "clinic", "scanner"),
    "split": ("split", "set", "fold", "subset"),
    "mask": ("mask", "mask_path", "segmentation", "seg"),
}
#: columns that may tell patients apart, where many of their values differ; people look for the others first
LIKE_PATIENTS = ("lesion_id", "lesion", "record", "record_id", "mrn", "case", "accession", "exam_id")
LISTED = 0.05  #: share of a folder's images that a table in it lists, if it is theirs
FEWEST_PATIENTS = 0.2  #: share of the rows that such a column must have different values for
MOST_SITES = 50


@dataclass(frozen=True)
class Cases:
    """Rows with `path` and other `fields`, paths relative to `folder`. `is_new`: they must be written to a file;
    else they stand in a table whose columns have the names in `columns`."""

    folder: Path
    rows: list[dict[str, str]]
    fields: tuple[str, ...]
    columns: dict[str, str] = field(default_factory=dict)
    is_new: bool = True
    notes: tuple[str, ...] = ()

    @property
    def has_masks(self) -> bool:
        return "mask" in self.fields

    def files(self) -> list[Path]:
        return [self.folder / row["path"] for row in self.rows]

    def column(self, name: str) -> list[str] | None:
        return [row[name] for row in self.rows] if name in self.fields else None

    def as_csv(self, beside: Path) -> str:
        """The text of a CSV in the folder `beside`, from which its paths begin."""
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.fields, lineterminator="\n")
        writer.writeheader()
        for row in self.rows:
            values = {name: row[name] for name in self.fields}
            for name in {"path", "mask"} & set(values):
                values[name] = os.path.relpath(self.folder / values[name], beside)
            writer.writerow(values)
        return text.getvalue()


# --- tables ---------------------------------------------------------------------------------------------


def find_table(folder: Path, ignore: Path | None = None) -> Path | None:
    """The CSV in a folder that lists images, other than `ignore`; None where none does, BadInput where several do."""
    stems = _by_stem(folder)
    tables = [file for file in sorted(folder.glob("*.csv")) if ignore is None or file.resolve() != ignore.resolve()]
    counts = {file: _images_listed(read_table(file), folder, stems) for file in tables}
    # a table of something else may name an image or two by accident
    fewest = max(LISTED * len(set(stems.values())), max(counts.values(), default=0) / 2)
    listing = [file for file, count in counts.items() if count > fewest]
    if len(listing) > 1:
        names = ", ".join(file.name for file in listing)
        raise BadInput(f"--for {folder}: {names} all list images; name one of them, --for {listing[0]}")
    return listing[0] if listing else None


@dataclass(frozen=True)
class Wanted:
    """Names of columns or arrays that somebody has given, '' where a look shall find them."""

    images: str = ""
    label: str = ""

    def refuse_absent(self, path: Path, names: Iterable[str]) -> None:
        """BadInput where there is none of a name that was given."""
        names = list(names)
        for flag, name in (("--images", self.images), ("--label", self.label)):
            if name and name not in names:
                raise BadInput(f"{flag}: {path} has no '{name}'{nearest(name, names)}; it has {', '.join(names)}")


def unused_tables(folder: Path) -> str:
    """What to say of tables in a folder that name too few of its images to be used."""
    stems = _by_stem(folder)
    fits = [(file, _best_fit(read_table(file), folder, stems)) for file in sorted(folder.glob("*.csv"))]
    return "".join(f"; {file.name} is not used: no column names most of these images{fit}" for file, fit in fits)


def cases_in_table(file: Path, folder: Path, wanted: Wanted = Wanted()) -> Cases:  # noqa: B008 (frozen)
    """What a table lists; rows without a label, or whose image is not there, are left out with a note."""
    table, stems = read_table(file), _by_stem(folder)
    wanted.refuse_absent(file, table.columns)
    image = wanted.images or _image_column(table, file.parent, stems)
    if image is None:
        raise BadInput(
            f"--for {file}: no column names images that lie in {folder}{_best_fit(table, file.parent, stems)}; it has "
            f"{', '.join(table.columns)}, and one of them must hold their paths or names"
        )
    columns = {"path": image, **_named_columns(table, image, wanted.label)}
    sparse = [name for name in ("site", "patient") if name in columns and _is_sparse(table.column(columns[name]))]
    notes = [f"column {columns.pop(name)} is empty in most rows: not used for the {name}" for name in sparse]
    notes += like_patients_note(columns.get("patient", ""))
    if "label" not in columns and "mask" not in columns:
        raise BadInput(
            f"--for {file}: none of the columns {', '.join(table.columns)} looks like a label; name it with --label"
        )
    kept = {**columns, **_further_columns(table, columns)}
    rows = [{field: row[column] for field, column in kept.items()} for row in table.rows]
    found = [{**row, "path": _path(row["path"], file.parent, stems)} for row in rows]
    cases = _without_gaps(found, rows, file, columns)
    # a new table calls a column that is set aside by another name, so that no study takes it by itself
    return replace(cases, is_new=cases.is_new or bool(sparse), notes=(*notes, *cases.notes))


def _is_sparse(cells: np.ndarray) -> bool:
    return bool(np.mean(cells == "") > 0.5)


def _further_columns(table: Table, columns: Mapping[str, str]) -> dict[str, str]:
    """Columns that a study may name for sub-groups, by the name they get in a new table: their own, unless it would
    mean there what they are not."""
    rest = [name for name in table.columns if name not in columns.values()]
    return {f"other_{name}" if name in ("path", *NAMES) else name: name for name in rest}


Rows = list[dict[str, str]]


def _without_gaps(found: Rows, rows: Rows, file: Path, columns: dict[str, str]) -> Cases:
    lost = [row["path"] for row, own in zip(rows, found, strict=True) if not own["path"]]
    kept, doubles = _without_doubles([row for row in found if row["path"]])
    notes = [f"{_rows(len(lost))} no image that is there, such as '{lost[0]}': left out"] if lost else []
    notes += [f"{_rows(len(doubles))} an image again, such as '{doubles[0]}': left out"] if doubles else []
    for what in [name for name in ("label", "site", "patient", "mask") if name in columns]:
        full = _with_label(kept) if what == "label" else [row for row in kept if row[what]]
        if len(full) < len(kept):
            gap = next(row[what] for row in kept if row not in full)
            such = f"such as '{gap}'" if gap else "an empty cell"
            count = len(kept) - len(full)
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


def _rows(count: int) -> str:
    return "1 row names" if count == 1 else f"{count} rows name"


def _with_label(rows: Rows) -> Rows:
    return [row for row, is_there in zip(rows, are_labels([row["label"] for row in rows]), strict=True) if is_there]


def _by_stem(folder: Path) -> dict[str, Path]:
    """Images below a folder by their names, with and without what follows the first dot."""
    files = [file for file in map(Path, files_below(folder)) if is_image_name(file)]
    return {key: file for file in files for key in (file.name.partition(".")[0], file.name)}


def _path(cell: str, folder: Path, stems: Mapping[str, Path]) -> str:
    """The path, from `folder`, of the image that a cell names; nothing where there is none."""
    if cell and (folder / cell).is_file():
        return cell
    cell = cell.replace("\\", "/")  # a table that was made on Windows
    if cell and (folder / cell).is_file():
        return cell
    file = stems.get(cell) or stems.get(Path(cell).name)
    return os.path.relpath(file, folder) if file and cell else ""


def _image_column(table: Table, folder: Path, stems: Mapping[str, Path]) -> str | None:
    """The column most of whose cells name images."""
    counts = {name: sum(bool(_path(row[name], folder, stems)) for row in table.rows) for name in table.columns}
    best = max(counts, key=lambda name: counts[name], default=None)
    return best if best is not None and counts[best] > len(table) / 2 else None


def _best_fit(table: Table, folder: Path, stems: Mapping[str, Path]) -> str:
    """Which column names some of the images, and a cell of it that names none; nothing where no column does."""
    counts = {name: sum(bool(_path(row[name], folder, stems)) for row in table.rows) for name in table.columns}
    best = max(counts, key=lambda name: counts[name], default="")
    if not best or not counts[best]:
        return ""
    gone = next((row[best] for row in table.rows if not _path(row[best], folder, stems)), None)
    such = "" if gone is None else f"; such as '{gone}' is not there"
    return f" ('{best}' fits {counts[best]} of {len(table)} rows{such})"


def _images_listed(table: Table, folder: Path, stems: Mapping[str, Path]) -> int:
    """How many images a table names; 0 where it has no column of images."""
    column = _image_column(table, folder, stems)
    return len({_path(row[column], folder, stems) for row in table.rows} - {""}) if column else 0


def _plain(name: str) -> str:
    return name.strip().lower().replace(" ", "_")


def likely_patients(values: Mapping[str, np.ndarray]) -> str:
    """Of columns or arrays, the one that may tell patients apart by its name and its values; '' where none does."""
    by_name = {_plain(name): name for name in values}
    names = [by_name[name] for name in LIKE_PATIENTS if name in by_name]
    return next((name for name in names if _many_differ(values[name])), "")


def like_patients_note(name: str) -> list[str]:
    """What is said of a column or an array that is taken for patients though it may be something else."""
    taken = f"'{name}' is taken for the patient: images that share one stay in one split"
    return [taken] if _plain(name) in LIKE_PATIENTS else []


def _many_differ(cells: np.ndarray) -> bool:
    different = set(cells.tolist())
    return "" not in different and len(different) >= max(2, FEWEST_PATIENTS * len(cells))


def _named_columns(table: Table, image: str, label: str = "") -> dict[str, str]:
    """Columns by what they hold; a lone column of unknown name is the label."""
    by_name = {_plain(name): name for name in table.columns if name not in (image, label)}
    found = {"label": label} if label else {}
    for what in [name for name in NAMES if name not in found]:
        names = NAMES[what]
        exact = [by_name[name] for name in names if name in by_name]
        near = [by_name[own] for name in names if len(name) > 2 for own in by_name if name in re.split(r"[_-]", own)]
        if exact or near:
            found[what] = (exact or near)[0]
    if "site" in found and not 2 <= len(set(table.column(found["site"]).tolist()) - {""}) <= MOST_SITES:
        del found["site"]
    rest = [name for name in by_name.values() if name not in found.values()]
    if "patient" not in found and (patients := likely_patients({name: table.column(name) for name in rest})):
        found["patient"] = patients
    if "label" not in found and "mask" not in found and len(rest) == 1:
        found["label"] = rest[0]
    if "label" in found and "mask" in found:
        del found["mask" if label else "label"]
    return found


# --- masks beside images --------------------------------------------------------------------------------


def paired_masks(path: Path, files: Sequence[Path]) -> Cases | None:
    """Images with masks that have their names, or that lie alone with them in a folder; None where masks are not what
    this is. Images without one are left out, with a note."""
    masks, images = _by_name(path, files) or _by_folder(path, files) or ({}, {})
    both = [stem for stem in images if stem in masks]
    if not both:
        return None
    _refuse_doubles(path, files, [*images.values(), *masks.values()])
    alone = [images[stem].name for stem in images if stem not in masks]
    many = "image has no mask and is" if len(alone) == 1 else "images have no mask and are"
    notes = (f"{len(alone)} {many} left out, such as {alone[0]}",) if alone else ()
    rows = [{"path": _below(images[stem], path), "mask": _below(masks[stem], path)} for stem in both]
    return Cases(path, rows, ("path", "mask"), notes=notes)


Pairs = tuple[dict[str, Path], dict[str, Path]]


def _by_name(top: Path, files: Sequence[Path]) -> Pairs | None:
    """Masks and images by the first key that tells all files apart; where none does, by the first that finds masks."""
    stems = [_stem(file) for file in files if not is_mask(file, top)]
    # two hospitals, or two patients, may have given images the same names
    keys = [_stem] * (len(set(stems)) == len(stems)) + [partial(key, top) for key in (_stem_below, _above, _first)]
    found = [pairs for pairs in (_by(key, files, top) for key in keys) if _fit(*pairs, fewest=1)]
    return next((pairs for pairs in found if sum(map(len, pairs)) == len(files)), found[0] if found else None)


def _by_folder(top: Path, files: Sequence[Path]) -> Pairs | None:
    """Masks and images by the folder in which they lie alone; None where several masks lie in one."""
    masks, images = _by(_folder, files, top)
    each = len(masks) == sum(is_mask(file, top) for file in files)
    return (masks, images) if each and _fit(masks, images, fewest=2) else None


def _fit(masks: Mapping[str, Path], images: Mapping[str, Path], fewest: int) -> bool:
    return len(masks.keys() & images.keys()) >= max(fewest, len(images) / 2)


def _refuse_doubles(top: Path, files: Sequence[Path], used: Sequence[Path]) -> None:
    """BadInput where files would be lost, because others have the same key."""
    lost = sorted(set(files) - set(used))
    if lost:
        many = "masks lie beside one image" if is_mask(lost[0], top) else "images lie beside one mask"
        raise BadInput(
            f"--for {top}: several {many}, such as in {lost[0].parent} ({lost[0].name}); keep the one that belongs to "
            "it, or add a CSV with the columns path and mask"
        )


def _by(key: Callable[[Path], str], files: Sequence[Path], top: Path) -> Pairs:
    """Masks and images by a key."""
    masks = {key(file): file for file in files if is_mask(file, top)}
    return masks, {key(file): file for file in files if not is_mask(file, top)}


def is_mask(file: Path, top: Path) -> bool:
    """Whether a file is a mask, by its folder or by the end of its name."""
    folders = file.relative_to(top).parts[:-1]
    return any(MASK_FOLDER.match(name) for name in folders) or bool(MASK_ENDING.search(file.name.partition(".")[0]))


def masks_among(files: Sequence[Path], top: Path) -> list[Path]:
    """The files that are masks by folder or name, and have the name of an image that lies there too; or that are called
    `mask` and nothing else, and lie beside one."""
    pictures = [file for file in files if not is_mask(file, top)]
    images, folders = {_stem(file) for file in pictures}, {file.parent for file in pictures}
    masks = [file for file in files if is_mask(file, top)]
    return [file for file in masks if (_stem(file) in images if _stem(file) else file.parent in folders)]


def _stem(file: Path) -> str:
    return MASK_ENDING.sub("", file.name.partition(".")[0])


def _stem_below(top: Path, file: Path) -> str:
    """The name with all folders but those that only say whether it is an image or a mask."""
    folders = file.relative_to(top).parts[:-1]
    kept = [name for name in folders if not MASK_FOLDER.match(name) and not IMAGE_FOLDER.match(name)]
    return "/".join([*kept, _stem(file)])


def _above(top: Path, file: Path) -> str:
    """The name with all folders but the last, which may be one of images or of masks by any name."""
    return "/".join([*file.relative_to(top).parts[:-2], _stem(file)])


def _first(top: Path, file: Path) -> str:
    return f"{file.relative_to(top).parts[0]}/{_stem(file)}"


def _folder(file: Path) -> str:
    return str(file.parent)


def _below(file: Path, top: Path) -> str:
    return file.relative_to(top).as_posix()
