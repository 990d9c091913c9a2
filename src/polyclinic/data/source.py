"""Sources: the `[data]` table of a study and how its images are loaded; `at-sites`, the source of a deployed study.

Sources that read files are prepared once, kept in the cache, and memory-mapped from then on. An entry of the cache is
named by the source's settings, the paths, sizes and modification times of its files, and the code that prepares them.
An interrupted preparation goes on where it stopped. The source is only read.
"""

import inspect
import json
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from polyclinic.data.allowed_paths import refuse_outside
from polyclinic.data.cache import PACKAGE, Progress, code_digest, entry_lock, files_below, files_digest
from polyclinic.data.dataset import Dataset, Fold, PerClass
from polyclinic.data.doubles import several_labels, twins
from polyclinic.data.labels import Value, balanced, classes_of, kept, sets_of, to_number
from polyclinic.data.listing import PER_IMAGE, Listing, prepare_images
from polyclinic.data.pixels import MOST_PIXELS, Fit, Shape
from polyclinic.errors import BadInput
from polyclinic.files import cache_folder, digest_of
from polyclinic.plugins import code_of
from polyclinic.settings import Settings

TASKS = ("classification", "regression", "segmentation")
#: settings that say which image goes where and how its site's camera changes it
SPREAD: tuple[str, ...] = ("validation", "test", "fold", "tuning_fold", "test_per_class", "test_total_per_class")
SPREAD += ("acquisition", "opt_out")


class Source(Settings):
    """One subclass per source, in one file of `data/datasets/`, with its own settings as fields."""

    source: str = Field(description="where the images come from; `polyclinic data list` names all sources")
    size: int = Field(64, ge=16, le=1024, description="side of the square images, in pixels")
    validation: float = Field(0.15, ge=0, lt=1, description="share of the images held out for model selection")
    test: float = Field(0.2, gt=0, lt=1, description="share of the images held out for testing")
    fold: str | None = Field(
        None,
        description="cross-validation: 2/5 tests on the second of five folds, instead of on the share `test`; patients "
        "stay together, and every institution's images are in all folds",
    )
    tuning_fold: str | None = Field(
        None,
        description="cross-validation of settings: 2/5 validates on the second of five folds of the images that are "
        "not for testing, instead of on the share `validation`; `polyclinic tune --folds` sets it",
    )
    test_per_class: PerClass | None = Field(
        None,
        description="test images of each class at every site: a number, or equal for as many as the site has of its "
        "rarest class; the other test images are left out of the study",
    )
    test_total_per_class: int | None = Field(
        None, ge=1, description="test images of each class, of all sites together; others are left out of the study"
    )
    acquisition: float = Field(
        0.0, ge=0, le=1, description="sites' cameras differ: contrast, colour, blur, noise, vignette, crop"
    )
    opt_out: Path | None = Field(
        None,
        description="a file of patients (or numbers of images), a line each, to leave out after the split is drawn",
    )
    seed: int = Field(0, ge=0, description="seed of the split and of the partition, apart from the study's seed")

    #: tasks this source has labels for; checked against `[task]` before anything is loaded
    tasks: ClassVar[tuple[str, ...]] = ("classification",)
    #: whether its examples are volumes (`data/volumes/`), and not images
    volumes: ClassVar[bool] = False

    @field_validator("fold", "tuning_fold")
    @classmethod
    def _fold(cls, text: str | None) -> str | None:
        return None if text is None else str(Fold.parse(text))

    @field_validator("test_per_class", mode="before")
    @classmethod
    def _per_class(cls, value: object) -> object:
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if value is not None and not whole and value != "equal":
            raise ValueError("must be a whole number of 1 or more, or equal")
        return value

    @abstractmethod
    def load(self) -> Dataset:
        """Every image of the source, prepared at `size`."""

    def more_facts(self) -> dict[str, Any]:
        """Facts of `PreparedSites.info` that only sources of this kind have."""
        return {}

    def load_shared(self) -> Dataset:
        """As `load`, for whoever changes nothing in it: a source may give the same arrays more than once."""
        return self.load()

    def without_pixels(self) -> Dataset:
        """The same images with black pixels: for whoever counts them. A source may do this without reading one."""
        return self.load()


def black_images(count: int, channels: int, size: int) -> np.ndarray:
    """uint8 [count, channels, size, size], without the memory of so many."""
    return np.broadcast_to(np.zeros((1, 1, 1, 1), dtype=np.uint8), (count, channels, size, size))


#: names of sources whose examples are at deployed sites
AT_SITES = ("at-sites", "volumes-at-sites")


class AtSites(Source):
    """Images that never leave their sites: each opens its own under a name that all have agreed on."""

    source: Literal["at-sites"] = "at-sites"
    dataset: str = Field("images", description="the name under which every site's own settings know its images")
    channels: Literal[1, 3] = Field(1, description="1 for grey, 3 for colour")
    classes: tuple[str, ...] = Field(("no", "yes"), description="the classes, in order; none where values are learnt")
    unit: str = Field("", description="the unit of the values to predict, such as months")
    label_range: tuple[float, float] | None = Field(None, description="smallest and largest value to predict")

    tasks: ClassVar[tuple[str, ...]] = TASKS

    def load(self) -> Dataset:
        raise BadInput(
            "data.source: 'at-sites' has no images here, each site has its own; `polyclinic deploy` runs such a study"
        )

    def info(self, sites: tuple[str, ...]) -> dict:
        """The facts that stand for `PreparedSites.info` where nobody but the sites can count."""
        return {
            "source": self.source,
            "channels": self.channels,
            "size": self.size,
            "classes": list(self.classes),
            "unit": self.unit,
            "label_range": list(self.label_range) if self.label_range else None,
            "counts": {site: {} for site in sites},
            "class_counts": {},
            "digests": {},
            "mean_ks": None,
        }


# --- sources that read files -----------------------------------------------------------------------------------


#: settings that do not change what is prepared, only how it is split afterwards
AFTERWARDS = {*SPREAD, "seed", "origin", "max_pixels", "allow_outside"}

#: a path that begins with it lies in the folder that the environment variable POLYCLINIC_DATA names
DATA_FOLDER = "$POLYCLINIC_DATA"


class Located(Source):
    """A source with a path. A subclass says what its images are, where to get them and how they lie."""

    path: Path = Field(
        description="the folder or file of the source, relative to this file (with --set and in Python, to where "
        "polyclinic is started), or $POLYCLINIC_DATA/..."
    )
    origin: str | None = Field(None, description="where these images can be had, told to whoever lacks them")
    allow_outside: bool = Field(False, description="files may lie outside `path`'s folder, by paths or symbolic links")

    #: whether a table or a link of whoever made the data, and not a setting, says which files are read
    outside_files: ClassVar[bool] = False
    #: where to get the images and under which terms, for `polyclinic data show`
    where: ClassVar[str] = "Your own."
    #: drawn images that stand in for these, to try a study without them
    phantom: ClassVar[str] = "chest-phantom"
    #: what must lie at `path`, for `polyclinic data show`
    layout: ClassVar[str] = ""

    @field_validator("path")
    @classmethod
    def _home(cls, path: Path) -> Path:
        """The whole path, so that a run can be resumed from any folder."""
        path = path.expanduser()
        return path if path.parts[:1] == (DATA_FOLDER,) else Path(os.path.abspath(path))

    @property
    def location(self) -> Path:
        """The place of `path` on this machine; a study keeps `path` as it was written, so that it fits other
        machines."""
        if self.path.parts[:1] != (DATA_FOLDER,):
            return self.path
        folder = os.environ.get(DATA_FOLDER[1:])
        if not folder:
            raise BadInput(
                f"data.path: '{self.path}' needs the environment variable POLYCLINIC_DATA, which names the folder of "
                f"your images; {self._cure()}"
            )
        return Path(folder, *self.path.parts[1:]).expanduser()

    def _cure(self) -> str:
        """The origin of the images, and the one word that makes the study run without them."""
        where = self.origin or (self.where if self.where != Located.where else "")
        get = where.rstrip(".") or f"`polyclinic data show {self.source}` says what should be there"
        phantom = "hand-phantom" if getattr(self, "label_range", None) else self.phantom
        return f'to get it: {get}; to run on drawn images instead: source = "{phantom}" in [data]'

    def files(self) -> Iterable[str | Path]:
        """The files whose change makes a new preparation necessary: `path`, or all below it."""
        return files_below(self.location) if self.location.is_dir() else [self.location]

    def fingerprint(self) -> str:
        """Names the content of the source's files."""
        self.refuse_missing_path()
        files = list(self.files())
        self.refuse_files_outside(files)
        return files_digest(files, self.location)

    def refuse_files_outside(self, files: Sequence[str | Path]) -> None:
        """One sentence where a file of the source lies elsewhere than its folder, and the study does not allow it."""
        if self.outside_files and not self.allow_outside:
            top = self.location if self.location.is_dir() else self.location.parent
            refuse_outside(files if len(files) > 1 or self.location.is_dir() else [], top)

    def refuse_missing_path(self) -> None:
        """One sentence when there is nothing at `path`."""
        if not self.location.exists():
            raise BadInput(f"data.path: there is nothing at '{self.location}'; {self._cure()}")


class FileSource(Located):
    """A source of images in files."""

    shape: Shape = Field("squash", description="how an oblong image becomes square: squash, pad or crop")
    channels: Literal["auto", 1, 3] = Field("auto", description="1 for grey, 3 for colour, auto to look")
    max_pixels: int = Field(
        MOST_PIXELS,
        ge=1,
        description="most pixels of an image or slice, by what its file declares; a volume has 8 times as many",
    )

    @abstractmethod
    def listing(self) -> Listing:
        """Every image of the source, without opening one."""

    def load(self) -> Dataset:
        return self.prepared()

    def without_pixels(self) -> Dataset:
        listing = self._chosen(self.listing())
        return Dataset(
            images=black_images(len(listing), 1, self.size),
            **listing.arrays(),
            classes=listing.classes,
            unit=listing.unit,
            label_range=listing.label_range,
            column_names=listing.column_names,
        )

    def prepared(self, cache: Path | None = None, progress: Progress | None = None) -> Dataset:
        """The images at `size`, memory-mapped from the cache, prepared first where they are not there yet."""
        folder = cache_folder(cache) / "prepared" / self._entry()
        if not (folder / "facts.json").is_file():
            listing = self._chosen(self.listing())
            with entry_lock(folder):
                prepare_images(listing, Fit(self.size, self.shape, self.channels), folder, progress)
        return open_prepared(folder)

    def _chosen(self, listing: Listing) -> Listing:
        """All images, or as many of each class as a source with the setting `per_class` asks for."""
        per_class = getattr(self, "per_class", None)
        return listing.take(balanced(listing.labels, per_class, self.seed)) if per_class else listing

    def _entry(self) -> str:
        code = [Path(inspect.getfile(kind)) for kind in type(self).__mro__ if kind.__module__.startswith("polyclinic.")]
        code += [PACKAGE / name for name in ("doubles.py", "listing.py", "pixels.py", "reading.py")]
        drawn = {"seed"} if getattr(self, "per_class", None) else set()
        settings = self.model_dump(mode="json", exclude=AFTERWARDS - drawn)
        settings["path"] = str(self.location.resolve())
        made_of = {"settings": settings, "content": self.fingerprint(), "code": code_digest(set(code))}
        foreign = code_of(type(self))
        return digest_of(made_of | ({"plugins": foreign} if foreign else {}))


def open_prepared(folder: Path) -> Dataset:
    """The dataset of an entry of the cache; its images and masks are memory maps."""
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    names = ("images", "masks", "geometry", *PER_IMAGE)
    files = {name: folder / f"{name}.npy" for name in names if (folder / f"{name}.npy").exists()}
    arrays = {
        name: np.load(file, mmap_mode="r" if name in ("images", "masks") else None, allow_pickle=False)
        for name, file in files.items()
    }
    bounds = facts["label_range"]
    digests = np.load(folder / "digests.npy", allow_pickle=False)
    return Dataset(
        **arrays,
        twins=twins(digests) if len(np.unique(digests)) < len(digests) else None,
        classes=tuple(facts["classes"]),
        unit=facts["unit"],
        label_range=tuple(bounds) if bounds else None,
        column_names=tuple(facts.get("column_names", ())),
    )


# --- labels of a user's own images ----------------------------------------------------------------------------


NAMED_AT_MOST = 5  #: labels that cannot be used
REMOVE = "remove these images"


class LabelledSource(FileSource):
    """A source whose labels are classes unless `label_range` says that they are values."""

    label_range: tuple[float, float] | None = Field(
        None, description="lowest and highest possible value to predict; labels are then numbers, not classes"
    )
    unit: str = Field("", description="unit of a value to predict, e.g. 'months'")
    keep: dict[str, tuple[Value, ...]] | None = Field(None, description="values to keep, as in { labels = [0, 2, 3] }")
    merge: dict[str, tuple[Value, ...]] | None = Field(None, description="labels of one class: { diseased = [2, 3] }")
    columns: tuple[str, ...] = Field((), description="columns or arrays kept for results by sub-group: ['sex']")
    rename: dict[str, str] | None = Field(None, description='new names of labels: { "0" = "healthy" }')

    several: str | tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="an image may have several labels (task multilabel): the sign between those of a cell, '|', or the "
        "columns of 0 and 1 (of an archive: names of the columns of labels), ['mass', 'cyst']",
    )
    per_class: int | None = Field(None, ge=1, description="so many images of each class, drawn by data.seed")

    tasks: ClassVar[tuple[str, ...]] = ("classification", "regression", "segmentation")
    #: what to do about images whose label is no value
    cure: ClassVar[str] = REMOVE

    @model_validator(mode="after")
    def _value_or_class(self) -> "LabelledSource":
        if self.unit and self.label_range is None:
            raise ValueError("unit needs label_range, the lowest and highest possible value")
        if self.label_range is not None and not self.label_range[0] < self.label_range[1]:
            raise ValueError("label_range must be the lowest and then the highest possible value")
        if self.label_range is not None and (self.merge or self.rename or self.per_class):
            raise ValueError("merge, rename and per_class are for classes; drop them or label_range")
        if self.several and self.label_range is not None:
            raise ValueError("several is for labels, and label_range for values; drop one of them")
        if self.several and (self.merge or self.rename):
            raise ValueError("merge and rename would name sets of labels, such as 'cyst|mass'; drop them or several")
        if isinstance(self.several, tuple) and len(set(self.several)) < len(self.several):
            raise ValueError("several names a column twice; name each once")
        return self

    def more_columns(self, values: Sequence[np.ndarray], rows: np.ndarray) -> np.ndarray | None:
        """The chosen rows of the columns that `columns` names, str [N, K]; None where it names none."""
        return np.stack([np.asarray(column)[rows].astype(str) for column in values], axis=1) if values else None

    def kept(self, columns: Mapping[str, np.ndarray]) -> np.ndarray:
        """Indices of the images that `keep` leaves."""
        return kept(columns, self.keep or {})

    def targets(
        self, values: np.ndarray, place: Callable[[int], str], names: Sequence[str] | np.ndarray | None = None
    ) -> tuple[np.ndarray, tuple[str, ...]]:
        """Class indices and names of the classes; or values and nothing."""
        if self.label_range is None:
            none = [i for i, value in enumerate(values.tolist()) if str(value).strip().lower() == "nan"]
            if none:  # or the text that NaN becomes in a table
                raise BadInput(_named([f"{place(i)}: the label is NaN, which is no class" for i in none], self.cure))
            if self.several:
                return classes_of(sets_of(values, self.several, place))
            labels, classes = classes_of(values, names, self.merge, self.rename)
            if found := several_labels(classes):
                first = next(i for i, label in enumerate(labels) if classes[label] == found)
                raise BadInput(
                    f"{place(first)}: the label '{found}' names several, and one label of an image is learnt; set "
                    "data.several = '|' (the sign between them) and task.name = 'multilabel', write the one to learn "
                    "into a column of its own, or give combinations other names (data.rename)"
                )
            return labels, classes
        return numbers(values, place, self.label_range, self.cure), ()


def numbers(
    values: np.ndarray, place: Callable[[int], str], bounds: tuple[float, float], cure: str = REMOVE
) -> np.ndarray:
    """float32 [N] within the bounds; labels that are not are named by their places, with the cure."""
    found = [to_number(value) for value in values.tolist()]
    none = [f"{place(i)}: the label '{values[i]}' is not a number" for i, value in enumerate(found) if value is None]
    if none:
        raise BadInput(_named(none, cure))
    result = np.array(found, dtype=np.float32)
    outside = np.flatnonzero((result < bounds[0]) | (result > bounds[1])).tolist()
    words = [f"{place(i)}: the label {values[i]} is outside data.label_range {list(bounds)}" for i in outside]
    if words:
        raise BadInput(_named(words, f"widen it, or {cure}"))
    return result


def _named(problems: Sequence[str], cure: str) -> str:
    """The first few of several problems, how many there are, and the cure."""
    more = len(problems) - NAMED_AT_MOST
    lines = [*problems[:NAMED_AT_MOST], *([f"and {more} more; {len(problems)} of this kind in all"] * (more > 0))]
    return "\n  ".join([*lines, cure]) if len(problems) > 1 else f"{problems[0]}; {cure}"
