"""A first look at tables and archives: what their columns and arrays mean, by names, values and shapes."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from polyclinic.data.archives import Archive, as_bytes, sides_of
from polyclinic.data.cache import files_below
from polyclinic.data.datasets.npz import Columns
from polyclinic.data.labels import Labels, are_labels, code_notes, labels_of, refuse_unlearnable
from polyclinic.data.reading import is_image_name
from polyclinic.data.survey_cases import (
    Cases,
    Hints,
    Sizes,
    Survey,
    columns_by_name,
    like_patients_note,
    may_be_sites,
    rarest_of,
    shared_patients,
)
from polyclinic.data.tables import Table, read_table
from polyclinic.errors import BadInput

#: names of columns by what they hold, the likeliest first
NAMES: dict[str, tuple[str, ...]] = {
    "label": (
        *("label", "class", "diagnosis", "dx", "target", "boneage"),
        *("age", "months", "years", "grade", "score", "finding"),
    ),
    "patient": (
        *("patient", "patient_id", "patientid", "subject", "subject_id", "case_id", "person"),
        *("patientennummer", "patientennr", "patienten_id", "patienten-id", "numero_patient", "id_patient", "paziente"),
        *("id_paziente", "paciente", "id_paciente", "patiënt", "patientnummer", "patiëntnummer", "sujet", "sujeto"),
    ),
    "site": (
        *("site", "hospital", "center", "centre", "institution", "clinic", "scanner"),
        *("klinik", "krankenhaus", "standort", "zentrum", "einrichtung", "hopital", "hôpital", "etablissement"),
        *("établissement", "clinique", "ospedale", "centro", "clinica", "clínica", "istituto", "institucion"),
        *("institución", "ziekenhuis", "kliniek", "centrum", "locatie", "instelling", "sede"),
    ),
    "split": ("split", "set", "fold", "subset"),
    "mask": ("mask", "mask_path", "segmentation", "seg"),
}
#: share of a folder's images that a table in it lists, if it is theirs: another may name an image or two by accident
LISTED = 0.05

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


def cases_in_table(file: Path, folder: Path, hints: Hints = Hints()) -> Cases:  # noqa: B008 (frozen)
    """The cases that a table lists; rows without a label, or whose image is not there, are left out with a note."""
    table, stems = read_table(file), _by_stem(folder)
    hints.refuse_absent(file, table.columns)
    fit = _fit(table, file.parent, stems, hints.images)
    if not hints.images and not fit.is_enough:
        raise BadInput(
            f"--for {file}: no column names images that lie in {folder}{fit}; it has "
            f"{', '.join(table.columns)}, and one of them must hold their paths or names"
        )
    columns = {"path": fit.column, **_named_columns(table, fit.column, hints)}
    known = [name for name in ("site", "patient") if name in columns]
    sparse = [name for name in known if np.mean(table.column(columns[name]) == "") > 0.5]
    notes = [f"column {columns.pop(name)} is empty in most rows: not used for the {name}" for name in sparse]
    notes += like_patients_note(columns.get("patient", ""))
    notes += may_be_sites({name: table.column(name) for name in table.columns}, columns)
    if "label" not in columns and "mask" not in columns:
        flags = [name for name in table.columns if len(table) > 1 and {*table.column(name)} == {"0", "1"}]
        if len(flags) > 1:
            raise BadInput(
                f"--for {file}: the columns {', '.join(flags)} are 0 or 1, several labels of an image, and one is "
                f"learnt; name it, such as --label {flags[0]}"
            )
        raise BadInput(
            f"--for {file}: none of the columns {', '.join(table.columns)} looks like a label; name it with --label"
        )
    # others may be named for sub-groups: by their own names, unless these would mean something else in a new table
    rest = [name for name in table.columns if name not in columns.values()]
    kept = {**columns, **{f"other_{name}" if name in ("path", *NAMES) else name: name for name in rest}}
    rows = [{field: row[column] for field, column in kept.items()} for row in table.rows]
    found = [{**row, "path": path} for row, path in zip(rows, fit.paths, strict=True)]
    cases = _without_gaps(found, rows, file, columns)
    # a new table calls a column that is set aside by another name, so that no study takes it by itself
    return replace(cases, is_new=cases.is_new or bool(sparse), notes=(*notes, *cases.notes))


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


def _named_columns(table: Table, image: str, hints: Hints = Hints()) -> dict[str, str]:  # noqa: B008 (frozen)
    """Columns by what they hold; a lone column of unknown name is the label, and of label and mask one counts."""
    label, given = hints.label, hints.columns()
    values = {name: table.column(name) for name in table.columns if name not in (image, *given.values())}
    names = {what: usual for what, usual in NAMES.items() if what not in given}
    found = given | columns_by_name(values, names, near=NAMES)
    rest = [name for name in values if name not in found.values()]
    if "label" not in found and "mask" not in found and len(rest) == 1:
        found["label"] = rest[0]
    if "label" in found and "mask" in found:
        del found["mask" if label else "label"]
    return found


# --- rows -----------------------------------------------------------------------------------------------


def _without_gaps(found: Rows, rows: Rows, file: Path, columns: dict[str, str]) -> Cases:
    """The rows that have an image and all that `columns` names, each once, with a note about the others."""
    lost = [row["path"] for row, own in zip(rows, found, strict=True) if not own["path"]]
    there = [row for row in found if row["path"]]
    different = {tuple(row.items()): row for row in reversed(there)}
    kept = [row for row in there if different[tuple(row.items())] is row]
    doubles = [row["path"] for row in there if different[tuple(row.items())] is not row]
    notes = [
        f"{len(paths)} row{' names' if len(paths) == 1 else 's name'} {what}, such as '{paths[0]}': left out"
        for paths, what in ((lost, "no image that is there"), (doubles, "an image again"))
        if paths
    ]
    for what in [name for name in ("label", "site", "patient", "mask") if name in columns]:
        cells = [row[what] for row in kept]
        is_full = are_labels(cells) if what == "label" else map(bool, cells)
        full = [row for row, is_there in zip(kept, is_full, strict=True) if is_there]
        if count := len(kept) - len(full):
            gap = next(row[what] for row in kept if row not in full)
            such = f"such as '{gap}'" if gap else "an empty cell"
            notes.append(f"{count} row{'s' * (count > 1)} without {columns[what]} ({such}) left out")
        kept = full
    if not kept:
        raise BadInput(f"--for {file}: no row has an image and a value in each of {', '.join(columns.values())}")
    return Cases(file.parent, kept, tuple(kept[0]), columns, is_new=kept != rows, notes=tuple(notes))


# --- archives -------------------------------------------------------------------------------------------

Shapes = Mapping[str, tuple[int, ...]]

#: names of arrays by what they hold, the likeliest first; upper and lower case count as one
IMAGES = ("images", "image", "x", "data", "imgs", "img", "pixels", "scans")
ARRAYS = {
    "label": ("labels", "y", "targets", *NAMES["label"]),
    "site": NAMES["site"],
    "patient": (*NAMES["patient"], "group", "groups", "case"),
    "split": ("split",),
}
#: settings of the source npz that have other names
SETTINGS = {"label": "labels", "patient": "group"}
MASKS = re.compile(r"(^|_)(masks?|seg|segs|segmentations?)($|_)", re.I)
SMALLEST = 8  #: pixels of a side, below which an array with three axes is no images


def survey_archive(path: Path, hints: Hints = Hints()) -> Survey:  # noqa: B008 (frozen)
    """The images of an archive; BadInput where images, or what to learn about them, are missing."""
    archive, shapes = _opened(path)
    hints.refuse_absent(path, (name.removeprefix("train_") for name in shapes))
    name, fit = hints.images, _candidates(shapes)
    if not name and len(fit) != 1:
        why = f"several arrays can be images ({', '.join(fit)})" if fit else "no array has images [N, H, W]"
        cure = f"name them: --images {fit[0]}" if fit else "save the images of one size as one array"
        raise BadInput(f"--for {path}: {why}; it has {_listed(shapes)}; {cure}")
    name = name or fit[0]
    prefixes = [prefix for prefix in ("", "train_", "val_", "test_") if prefix + name in shapes]
    shape = shapes[prefixes[0] + name]
    if not _has_image_shape(shape):
        raise BadInput(
            f"--images: '{name}' of {path} has the shape {list(shape)}, which images have not; choose from "
            f"{', '.join(fit) or 'none'}"
        )
    counts = {prefix: shapes[prefix + name][0] for prefix in prefixes}
    if not sum(counts.values()):
        raise BadInput(f"--for {path}: '{name}' holds no image; save the images and their labels in it first")
    first = [own.removeprefix(prefixes[0]) for own in shapes if own.startswith(prefixes[0])]
    arrays = {  # those with one entry for each image
        own: np.concatenate([archive[prefix + own].reshape(-1) for prefix in prefixes])
        for own in first
        if own != name and all(shapes.get(p + own) in ((count,), (count, 1)) for p, count in counts.items())
    }
    given = hints.columns()
    for what, own in given.items():
        if own not in arrays:
            flag, choices = "--label" if what == "label" else f"--{what}-column", ", ".join(arrays)
            raise BadInput(f"{flag}: '{own}' of {path} has not one entry for each image; choose from {choices}")
    given.pop("label", None)
    others = {own: values for own, values in arrays.items() if own not in given.values()}
    usual_names = {what: names for what, names in ARRAYS.items() if what not in given}
    by_name = columns_by_name(others, usual_names, near=("label",)) | given
    columns = {"images": name, **{SETTINGS.get(what, what): own for what, own in by_name.items()}}
    masks = [own for own in first if len(shapes[prefixes[0] + own]) >= 3 and MASKS.search(own) and own != name]
    usual = [own for own in ("masks", "mask") if own in masks] or (masks if len(masks) == 1 else [])
    if hints.label:
        columns["labels"] = hints.label
    elif usual:
        columns.pop("labels", None)
        columns["masks"] = usual[0]
    elif "labels" not in columns:
        raise BadInput(f"--for {path}: {_no_labels(shapes, prefixes[0], sum(counts.values()))}")
    told = Columns(archive, name)
    for own in (columns[what] for what in ("labels", "site") if what in columns):  # names in the place of numbers
        names, values = told.names_of(own), arrays[own]
        is_number = names is not None and np.issubdtype(values.dtype, np.integer)
        if names is not None and is_number and 0 <= values.min() <= values.max() < len(names):
            arrays[own] = names.astype(str)[values]
    texts = [str(value) for value in arrays[columns["labels"]].tolist()] if "labels" in columns else []
    labels = labels_of(texts) if texts else Labels.masks()
    pixels = archive.first(prefixes[0] + name)
    try:  # a study does not take all values
        as_bytes(pixels) if len(pixels) else None
    except ValueError as error:
        raise BadInput(f"--for {path}: '{name}', image 0: {error}") from None
    if texts:
        refuse_unlearnable(labels.classes, f"--for {path}")
    gaps = _gaps(texts, labels.task)
    known = {what: arrays[columns[what]].astype(str).tolist() for what in ("group", "site") if what in columns}
    taken = like_patients_note(columns.get("group", ""))
    taken += shared_patients(*known.values()) if len(known) == 2 else []
    taken += may_be_sites(arrays, columns)
    height, width = map(int, sides_of(shape))
    return Survey(
        path=path,
        source="npz",
        labels=labels,
        images=sum(counts.values()),
        sizes=Sizes(((width, height),), (width, height)),
        columns=columns,
        sites=dict(Counter(known.get("site", ()))),
        patients=len(set(known["group"])) if "group" in known else None,
        notes=(*gaps, *code_notes(texts), *taken),
        rarest=rarest_of(texts, known.get("site")) if labels.task == "classification" else 0,
        keeps_classes=labels.task == "classification" and bool(gaps),
    )


def _no_labels(shapes: Shapes, prefix: str, images: int) -> str:
    """What is wrong with the labels of an archive in which no array has one for each image."""
    named = [own for wanted in ARRAYS["label"] for own in shapes if own.removeprefix(prefix).lower() == wanted]
    shape = shapes[named[0]] if named else ()
    if len(shape) == 2 and shape[0] == images:
        return (
            f"'{named[0]}' has {shape[1]} numbers for each image, several labels or one in {shape[1]} columns, and one "
            "label is learnt; save the number of each image's class as an array [N]"
        )
    if len(shape) in (1, 2):
        return f"'{named[0]}' has {shape[0]} entries for {images} images; save a label for each image"
    return f"no array looks like labels [N] or masks; it has {_listed(shapes)}; --label names one"


def _opened(path: Path) -> tuple[Archive, Shapes]:
    try:
        archive = Archive(path)
        return archive, {name: archive.shape(name) for name in archive}
    except BadInput as error:
        raise BadInput(f"--for {path}: is no NumPy archive that can be read ({error})") from None


def _candidates(shapes: Shapes) -> list[str]:
    """Names of arrays that can be the images; the one with a usual name alone, where there is one."""
    names = [own.removeprefix("train_") for own in shapes if _has_image_shape(shapes[own])]  # as MedMNIST calls them
    if usual := [own for wanted in IMAGES for own in names if own.lower() == wanted]:
        return usual[:1]
    fit = {
        own.removeprefix("train_")
        for own, shape in shapes.items()
        if _has_image_shape(shape) and min(sides_of(shape)) >= SMALLEST and not MASKS.search(own)
    }
    return sorted(own for own in fit if not own.startswith(("val_", "test_")))


def pictures_in(path: Path) -> Iterator[np.ndarray]:
    """The images of an archive, uint8 [H, W] or [H, W, 3] each; BadInput where nobody can say which array they are."""
    archive, shapes = _opened(path)
    fit = _candidates(shapes)
    if len(fit) != 1:
        raise BadInput(f"which array are the images? it has {_listed(shapes)}; call them images")
    images = Columns(archive, fit[0]).images
    return (as_bytes(images[number]) for number in range(len(images)))


def _has_image_shape(shape: tuple[int, ...]) -> bool:
    """[N, H, W], [N, H, W, C] or [N, C, H, W]."""
    return len(shape) == 3 or (len(shape) == 4 and (shape[1] in (1, 3) or shape[3] in (1, 3)))


def _listed(shapes: Shapes) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items()) or "none"


def _gaps(texts: Sequence[str], task: str) -> tuple[str, ...]:
    """A note about images of an archive that have no label; a study can leave them out where labels are classes."""
    gaps = [number for number, label in enumerate(are_labels(texts)) if not label]
    if not gaps:
        return ()
    count = "1 image has" if len(gaps) == 1 else f"{len(gaps)} images have"
    such = f"image {gaps[0]}: '{texts[gaps[0]]}'"
    cure = "data.keep leaves them out" if task == "classification" else "take them out of the archive before you run it"
    return (f"{count} no label ({such}, counted from 0); {cure}",)
