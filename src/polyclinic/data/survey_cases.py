"""Images that a first look has found: cases with their columns, and images paired with the masks beside them."""

import csv
import io
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from polyclinic.data.labels import Labels
from polyclinic.data.reading import Reader
from polyclinic.errors import BadInput, did_you_mean

#: folders and endings of names that say that a file is a mask
MASK_FOLDER = re.compile(
    r"^(masks?|seg|segs|segmentations?|annotations?|contours?|labels?tr|labels|gt|ground_?truth)$", re.I
)
MASK_ENDING = re.compile(r"(^|[_-])(mask|seg|segmentation|label|gt)$", re.I)
#: folders that say that images lie in them, and nothing else
IMAGE_FOLDER = re.compile(r"^(images?(tr)?|imgs?|scans?|data)$", re.I)
MOST_SITES = 50  #: a column, or a level of folders, with more different names holds something else than hospitals
SIZED = 40  #: images that are opened to see their sizes: a first look takes a second

Pairs = tuple[dict[str, Path], dict[str, Path]]


@dataclass(frozen=True)
class Hints:
    """Hints of somebody about images: regular expressions that find site and patient in names of files, and names of
    columns or arrays; '' where a look shall find it."""

    site: str = ""
    patient: str = ""
    images: str = ""
    label: str = ""
    site_column: str = ""
    patient_column: str = ""

    def columns(self) -> dict[str, str]:
        """The columns or arrays that were given, by what they hold."""
        given = {"label": self.label, "site": self.site_column, "patient": self.patient_column}
        return {what: name for what, name in given.items() if name}

    def refuse_absent(self, path: Path, names: Iterable[str]) -> None:
        """BadInput where there is none of a name that was given."""
        names = list(names)
        flags = {"--images": self.images, "--label": self.label, "--site-column": self.site_column}
        for flag, name in {**flags, "--patient-column": self.patient_column}.items():
            if name and name not in names:
                raise BadInput(f"{flag}: {path} has no '{name}'{did_you_mean(name, names)}; it has {', '.join(names)}")


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

    def files(self) -> list[Path]:
        return [self.folder / row["path"] for row in self.rows]

    def paths(self) -> list[str]:
        return [row["path"] for row in self.rows]

    def column(self, name: str) -> list[str] | None:
        return [row[name] for row in self.rows] if name in self.fields else None

    def with_column(self, name: str, values: Sequence[str], *notes: str) -> "Cases":
        """The cases with one column more, or with other values in it."""
        rows = [{**row, name: value} for row, value in zip(self.rows, values, strict=True)]
        return replace(self, rows=rows, fields=tuple(rows[0]), is_new=True, notes=(*self.notes, *notes))

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


@dataclass(frozen=True)
class Sizes:
    """Different (width, height) of the images that were opened, by their numbers of pixels; `all`: no other image is
    there."""

    found: tuple[tuple[int, int], ...] = ()
    median: tuple[int, int] = (0, 0)
    all: bool = True

    @property
    def smallest_side(self) -> int:
        return min(self.median)

    @property
    def oblong(self) -> bool:
        return any(width != height for width, height in self.found)

    def __str__(self) -> str:
        if not self.found:
            return "unknown size"
        named = [f"{width} x {height}" for width, height in self.found]
        if len(named) == 1:
            return f"{named[0]} pixels"
        return f"{len(named)} sizes{'' if self.all else ' or more'}, from {named[0]} to {named[-1]} pixels"


def sizes_of(files: Sequence[Path]) -> Sizes:
    """The sizes of a few images, taken evenly."""
    chosen = [files[i] for i in np.unique(np.linspace(0, len(files) - 1, SIZED).astype(int))] if files else []
    shapes = []
    for file in chosen:
        try:
            shapes.append(Reader().pixels(file).shape[:2])
        except Exception:  # a broken file is named by `study check`
            continue
    if not shapes:
        return Sizes()
    height, width = np.median(shapes, axis=0)
    found = sorted({(int(width), int(height)) for height, width in shapes}, key=lambda size: (size[0] * size[1], size))
    return Sizes(tuple(found), (int(width), int(height)), all=len(chosen) == len(files))


@dataclass(frozen=True)
class Survey:
    """The images at `path`; `columns` are the names of columns or arrays, by what they hold."""

    path: Path
    source: Literal["folder", "csv", "npz"]
    labels: Labels
    images: int
    sizes: Sizes
    columns: dict[str, str] = field(default_factory=dict)
    sites: dict[str, int] = field(default_factory=dict)
    patients: int | None = None  #: None where nothing says whose an image is
    patient_pattern: str = ""
    notes: tuple[str, ...] = ()
    slices: int = 1  #: of a volume
    site_pattern: str = ""
    table: Cases | None = None  #: all cases, also those of a CSV that a study can use as it is
    rarest: int = 0  #: fewest images of a class at a site that has some; of simulated sites, a third of the class
    keeps_classes: bool = False  #: some images of an archive have no label, and the study must leave them out

    @property
    def task(self) -> str:
        return self.labels.task

    @property
    def cases(self) -> Cases | None:
        """The cases that no file lists yet in a way that a study can use."""
        return self.table if self.table is not None and self.table.is_new else None


def shared_patients(patients: Sequence[str], sites: Sequence[str]) -> list[str]:
    """A note about patients of the same name at several sites."""
    seen: dict[str, set[str]] = {}
    for patient, site in zip(patients, sites, strict=True):
        seen.setdefault(patient, set()).add(site)
    both = [patient for patient, where in seen.items() if len(where) > 1]
    if not both:
        return []
    many = f"{len(both)} patients are" if len(both) > 1 else "1 patient is"
    return [
        f"{many} at more than one site, such as '{both[0]}', and counted once: if hospitals number their "
        "patients alike, write the hospital before the number"
    ]


def rarest_of(labels: Sequence[str], sites: Sequence[str] | None) -> int:
    """The fewest images of a class at a site; of all sites, a third, where nobody knows them: three are simulated."""
    if sites is None or len(set(sites)) < 2:
        return min(Counter(labels).values(), default=0) // 3
    return min(Counter(zip(labels, sites, strict=True)).values(), default=0)


# --- columns by their names ---------------------------------------------------------------------------

#: columns that may tell patients apart, where many of their values differ; people look for the others first
LIKE_PATIENTS = ("lesion_id", "lesion", "record", "record_id", "mrn", "case", "accession", "exam_id")
IMAGES_AT_A_SITE = 5  #: images for each value, on average, of a column that may name sites
FEWEST_PATIENTS = 0.2  #: share of the rows that such a column must have different values for


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
    if "patient" not in found:
        rest = [plain[name] for name in LIKE_PATIENTS if name in plain and plain[name] not in found.values()]
        different = {name: set(values[name].tolist()) for name in rest}
        enough = {name: max(2, FEWEST_PATIENTS * len(values[name])) for name in rest}
        if likely := [name for name, some in different.items() if "" not in some and len(some) >= enough[name]]:
            found["patient"] = likely[0]
    return found


def may_be_sites(values: Mapping[str, np.ndarray], columns: Mapping[str, str]) -> list[str]:
    """A note about columns that may say where images were taken, where none is known to."""
    if "site" in columns:
        return []
    counts = {name: len(set(one.tolist())) for name, one in values.items() if name not in columns.values()}
    likely = [
        f"{name} ({count} values)"
        for name, count in counts.items()
        if 2 <= count <= MOST_SITES and IMAGES_AT_A_SITE * count <= len(values[name])
    ]
    return [f"no column is taken for the sites; {', '.join(likely)} may be: --site-column NAME"] if likely else []


def like_patients_note(name: str) -> list[str]:
    """A note about a column or an array that is taken for patients though it may be something else."""
    taken = f"'{name}' is taken for the patient: images that share one stay in one split"
    return [taken] if _plain(name) in LIKE_PATIENTS else []


def _plain(name: str) -> str:
    return name.strip().lower().replace(" ", "_")


# --- masks beside images --------------------------------------------------------------------------------


def paired_masks(path: Path, files: Sequence[Path]) -> Cases | None:
    """Images with masks that have their names, or that lie alone with them in a folder; None where masks are not what
    this is. Images without one are left out, with a note."""
    masks, images = _by_name(path, files)
    both = [stem for stem in images if stem in masks]
    if not both:
        return None
    if lost := sorted(set(files) - {*images.values(), *masks.values()}):  # others have the same key
        many = "masks lie beside one image" if is_mask(lost[0], path) else "images lie beside one mask"
        raise BadInput(
            f"--for {path}: several {many}, such as in {lost[0].parent} ({lost[0].name}); keep the one that belongs to "
            "it, or add a CSV with the columns path and mask"
        )
    alone = [images[stem].name for stem in images if stem not in masks]
    many = "image has no mask and is" if len(alone) == 1 else "images have no mask and are"
    notes = (f"{len(alone)} {many} left out, such as {alone[0]}",) if alone else ()
    found = {"path": images, "mask": masks}
    rows = [{name: files[stem].relative_to(path).as_posix() for name, files in found.items()} for stem in both]
    return Cases(path, rows, ("path", "mask"), notes=notes)


def _by_name(top: Path, files: Sequence[Path]) -> Pairs:
    """Masks and images by the first key that tells all files apart; where none does, by the first that finds masks;
    else by the folder in which one mask and one image lie alone."""
    stems = [_stem(file) for file in files if not is_mask(file, top)]

    def below(file: Path) -> str:
        """The name with all folders but those that only say whether it is an image or a mask."""
        folders = file.relative_to(top).parts[:-1]
        kept = [name for name in folders if not MASK_FOLDER.match(name) and not IMAGE_FOLDER.match(name)]
        return "/".join([*kept, _stem(file)])

    keys = [  # two hospitals, or two patients, may have given images the same names
        *[_stem] * (len(set(stems)) == len(stems)),
        below,
        lambda file: "/".join([*file.relative_to(top).parts[:-2], _stem(file)]),  # masks in a folder of any name
        lambda file: f"{file.relative_to(top).parts[0]}/{_stem(file)}",
    ]
    found = [pairs for pairs in (_by(key, files, top) for key in keys) if _fit(*pairs, fewest=1)]
    if found:
        return next((pairs for pairs in found if sum(map(len, pairs)) == len(files)), found[0])
    masks, images = _by(lambda file: str(file.parent), files, top)
    each = len(masks) == sum(is_mask(file, top) for file in files)
    return (masks, images) if each and _fit(masks, images, fewest=2) else ({}, {})


def _fit(masks: Mapping[str, Path], images: Mapping[str, Path], fewest: int) -> bool:
    return len(masks.keys() & images.keys()) >= max(fewest, len(images) / 2)


def _by(key: Callable[[Path], str], files: Sequence[Path], top: Path) -> Pairs:
    """Masks and images by a key."""
    masks = {key(file): file for file in files if is_mask(file, top)}
    return masks, {key(file): file for file in files if not is_mask(file, top)}


def is_mask(file: Path, top: Path) -> bool:
    """True for a mask, by its folder or by the end of its name."""
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
