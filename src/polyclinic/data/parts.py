"""Prepared data: one folder of memory-mapped images for each site.

`prepare` does load -> split by patient -> spread over sites -> write, once; `open_site` maps one site's
arrays into memory, read-only. Layout of an entry of the cache:

    parts/<digest>/info.json
    parts/<digest>/<site>/{train,validation,test}/{images,labels,masks,cases,subgroup,columns}.npy
"""

import functools
import hashlib
import io
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from polyclinic.data.acquisition import apply_styles, crop_masks
from polyclinic.data.allowed_paths import SAFE, check_site_names, folder_name
from polyclinic.data.cache import PACKAGE, Progress, bytes_each, chunks, code_digest, entry_lock
from polyclinic.data.dataset import SPLITS, Dataset, Fold, balanced, balanced_total, patient_groups, split
from polyclinic.data.labels import label_histograms, mean_ks, pairwise_ks
from polyclinic.data.opt_out import names_in, without_patients
from polyclinic.data.partitions import Sites, assign_to_sites
from polyclinic.data.source import FileSource, Located, Source
from polyclinic.data.volumes import parts as volume_parts
from polyclinic.data.volumes.source import VolumeSource
from polyclinic.data.volumes.volume import are_volumes, bytes_of
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.files import atomic_folder, cache_folder, digest_of
from polyclinic.plugins import code_of, foreign_modules
from polyclinic.registry import reason

#: files up to this size are read at once, and not mapped into memory
READ_AT_ONCE = 2**17
#: sites up to which the KS statistic of each pair is written down
MOST_PAIRED = 40

#: the images of each split of each site, as indices into the dataset
Spread = dict[str, dict[str, np.ndarray]]
#: what becomes of a piece of an array on its way to a part, given where it starts
Change = Callable[[np.ndarray, int], np.ndarray]


@dataclass(frozen=True)
class ImageSet:
    """The images of one split of one site, memory-mapped and read-only.

    images uint8 [N, C, H, W], or `Volume`s [N] with their own masks; labels int64 or float32 [N];
    masks uint8 [N, H, W] or None;
    cases int64 [N], equal for images of one patient, or None; subgroup str [N] or None;
    columns str [N, K] or None, named by `PreparedSites.info["columns"]`; geometry float32 [N, 4] or None, as in Dataset
    """

    images: np.ndarray
    labels: np.ndarray
    masks: np.ndarray | None = None
    cases: np.ndarray | None = None
    subgroup: np.ndarray | None = None
    columns: np.ndarray | None = None
    geometry: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.images)

    def take(self, rows: np.ndarray) -> "ImageSet":
        """The images at `rows`, in that order, in memory."""
        return ImageSet(**{name: np.asarray(array)[rows] for name, array in vars(self).items() if array is not None})


@dataclass(frozen=True)
class SiteData:
    """The images of one site."""

    name: str
    train: ImageSet
    validation: ImageSet
    test: ImageSet
    #: names of the columns of the three
    column_names: tuple[str, ...] = ()

    @property
    def mapped_files(self) -> int:
        """Number of files that are open because their arrays are mapped into memory."""
        arrays = [*vars(self.train).values(), *vars(self.validation).values(), *vars(self.test).values()]
        return list(map(type, arrays)).count(np.memmap)

    def changed(self, change: Callable[[ImageSet], ImageSet]) -> "SiteData":
        """The same site with each of its three splits changed."""
        return replace(self, train=change(self.train), validation=change(self.validation), test=change(self.test))

    def without_test(self) -> "SiteData":
        """The same, but for the test images: none."""
        return replace(self, test=ImageSet(self.train.images[:0], self.train.labels[:0]))


@dataclass(frozen=True)
class PreparedSites:
    """The folder of all sites' images, and the facts about them that need no look at an image.

    info: source, channels, size, classes, unit, label_range, has_masks, counts[site][split],
    class_counts[site][split] (a list, by class), columns (their names), digests[split] (sha256), mean_ks,
    labels (histograms of training labels), pairwise_ks (up to 40 sites), left_out[origin] (images of no site)
    """

    folder: Path
    names: tuple[str, ...]
    info: dict[str, Any]


#: the file of each field of an ImageSet
FILES = {field.name: f"{field.name}.npy" for field in fields(ImageSet)}
#: in the folder of a site's parts: the names of its columns
COLUMNS = "columns.json"


def prepare(
    data: Source, sites: Sites, *, cache: Path | None = None, progress: Progress | None = None
) -> PreparedSites:
    """The parts of every site, from the cache where the same settings, files and code were there before."""
    settings: dict[str, Any] = {
        "data": data.model_dump(mode="json"),
        "sites": sites.model_dump(mode="json"),
        "content": data.fingerprint() if isinstance(data, Located) else "",
        "code": code_digest(PACKAGE.rglob("*.py")),
    }
    if data.opt_out is not None:
        settings["data"]["opt_out"] = names_in(data.opt_out)
    foreign = [*code_of(type(data)), *code_of(type(sites))]  # a plug-in that was edited makes other images
    folder = cache_folder(cache) / "parts" / digest_of(settings | ({"plugins": foreign} if foreign else {}))
    if not (folder / "info.json").is_file():
        with entry_lock(folder):
            if not (folder / "info.json").is_file():  # nobody else has made it meanwhile
                _write(folder, data, sites, cache, progress)
    info = json.loads((folder / "info.json").read_text(encoding="utf-8"))
    return PreparedSites(folder, tuple(info["counts"]), info)


def open_site(folder: Path, site: str) -> SiteData:
    """The arrays of one site; touches no file outside `folder`/`site`."""
    own = f"{folder}/{site}"  # texts, as a study may have a thousand sites, and a Path takes a while
    if not SAFE.fullmatch(site) or not os.path.isdir(own):
        wanted = folder_name(site)
        raise BadInput(f"sites: there is no part of '{wanted}' in '{folder}'; prepare the study's data first")
    parts = []
    for part in SPLITS:
        there, found = os.listdir(f"{own}/{part}"), {}
        for name, file in FILES.items():
            if file in there:
                found[name] = open_array(f"{own}/{part}/{file}")
        if volume_parts.FACTS in there:
            found["images"] = volume_parts.opened(Path(own, part))
        parts.append(ImageSet(**found))
    columns = f"{own}/{COLUMNS}"
    names = tuple(json.loads(Path(columns).read_text(encoding="utf-8"))) if os.path.exists(columns) else ()
    train, validation, test = parts
    return SiteData(site, train, validation, test, names)


def open_array(file: str) -> np.ndarray:
    """An array, read-only: mapped into memory, or read at once if it is small, which leaves no file open.

    A study with a thousand sites opens thousands of small files whose headers are alike, and `np.load` parses each of
    these as Python code. Whatever is unusual is left to it, and so is every complaint.
    """
    if os.path.getsize(file) > READ_AT_ONCE:
        return np.load(file, mmap_mode="r", allow_pickle=False)
    with open(file, "rb", buffering=0) as stream:
        data = stream.read()
    start = data.find(b"\n") + 1  # a header ends with the first one
    try:
        shape, by_columns, kind = _header(data[:start])
        if not (by_columns or kind.hasobject) and len(data) == start + math.prod(shape) * kind.itemsize:
            return np.ndarray(shape, kind, data, start)  # bytes never change
    except Exception:  # numpy reads a header as Python does: a damaged one fails in many ways
        pass
    array = np.load(file, allow_pickle=False)
    array.flags.writeable = False
    return array


@functools.lru_cache(maxsize=256)
def _header(head: bytes) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, order (True: column by column) and type out of the first bytes of a .npy file of format 1.0."""
    file = io.BytesIO(head)
    np.lib.format.read_magic(file)
    return np.lib.format.read_array_header_1_0(file)


def load(data: Source, cache: Path | None = None, progress: Progress | None = None) -> Dataset:
    """The whole source; what is read from files is prepared once and memory-mapped from then on."""
    if isinstance(data, FileSource | VolumeSource):
        return data.prepared(cache, progress)
    try:
        return data.load_shared()
    except BadInput:
        raise
    except Exception as error:
        if not foreign_modules(type(data)):
            raise
        raise WorkFailed(f"data.source: '{data.source}' of a plug-in cannot be loaded: {reason(error)}") from error


def _write(folder: Path, data: Source, sites: Sites, cache: Path | None, progress: Progress | None) -> None:
    dataset = load(data, cache, progress)
    where = spread(dataset, data, sites)
    check_site_names(where)
    with atomic_folder(folder) as scratch:
        for done, (site, parts) in enumerate(where.items(), start=1):
            for name in SPLITS:
                camera = Camera((data.seed, "style", site), data.acquisition, name)
                _write_part(scratch / site / name, dataset, parts[name], camera)
            if dataset.column_names:
                (scratch / site / COLUMNS).write_text(json.dumps(dataset.column_names), encoding="utf-8")
            if progress:
                progress("writing the sites' parts", done, len(where))
        facts = describe(data.source, dataset, where) | {"left_out": sites.left_out(dataset)} | data.more_facts()
        (scratch / "info.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")


def spread(dataset: Dataset, data: Source, sites: Sites) -> Spread:
    """The images of each split of each site, as a study's `[data]` and `[sites]` want them."""
    fold, tuning = (Fold.parse(text) if text else None for text in (data.fold, data.tuning_fold))
    shares = {"validation": data.validation, "test": data.test}
    splits = split(dataset, **shares, seed=data.seed, fold=fold, tuning_fold=tuning)
    if data.test_total_per_class is not None:
        splits = {**splits, "test": balanced_total(dataset, splits["test"], data.test_total_per_class, data.seed)}
    where = assign_to_sites(sites, dataset, splits, data.seed)
    where = where if data.test_per_class is None else balanced(dataset, where, data.test_per_class, data.seed)
    return where if data.opt_out is None else without_patients(where, dataset, names_in(data.opt_out))


@dataclass(frozen=True)
class Camera:
    """The camera of one site, which changes the images of one split on their way to its part; not at all where its
    `strength` is 0. `address` names the site's random draws."""

    address: tuple[str | int, ...]
    strength: float
    split: str

    def images(self, images: np.ndarray, start: int) -> np.ndarray:
        """The images from number `start` of the part on, as this site's camera would have taken them."""
        return apply_styles(images, self.address, self.strength, split=f"{self.split} {start}")

    def masks(self, masks: np.ndarray, start: int) -> np.ndarray:
        """Masks, cropped as their images are."""
        return crop_masks(masks, self.address, self.strength) if self.strength else masks


def _write_part(folder: Path, dataset: Dataset, index: np.ndarray, camera: Camera) -> None:
    folder.mkdir(parents=True)
    cases = None if dataset.patient is None else patient_groups(dataset)
    changes: dict[str, Change] = {"images": camera.images, "masks": camera.masks}
    for name, file in FILES.items():
        array = cases if name == "cases" else getattr(dataset, name)
        if array is None:
            continue
        if name == "images" and are_volumes(array):
            volume_parts.write(folder, array[index])
            continue
        change, shape = changes.get(name, lambda piece, start: piece), (len(index), *array.shape[1:])
        target = np.lib.format.open_memmap(folder / file, mode="w+", dtype=array.dtype, shape=shape)
        for piece in chunks(len(index), bytes_each(array)):  # a memory-mapped array never has to fit in memory
            target[piece] = change(array[index[piece]], piece.start)
        target.flush()


def describe(source: str, dataset: Dataset, where: Spread) -> dict[str, Any]:
    """The facts of `PreparedSites.info`, in plain values. A digest is of labels and images of a split in the source's
    order: the same however it is spread."""
    digests = {}
    for name in SPLITS:
        index = np.unique(np.concatenate([parts[name] for parts in where.values()]))
        total = hashlib.sha256(np.ascontiguousarray(dataset.labels[index]).tobytes())
        for piece in chunks(len(index), bytes_each(dataset.images)):
            total.update(bytes_of(dataset.images[index[piece]]))
        digests[name] = total.hexdigest()
    train_labels = {site: np.asarray(dataset.labels[parts["train"]]) for site, parts in where.items()}
    classes = len(dataset.classes)

    def by_class(parts: dict[str, np.ndarray]) -> dict[str, list[int]]:
        named = SPLITS if classes else ()
        return {name: np.bincount(dataset.labels[parts[name]], minlength=classes).tolist() for name in named}

    return {
        "source": source,
        **dict(zip(("channels", "size"), map(int, dataset.images.shape[1:]), strict=False)),
        "classes": list(dataset.classes),
        "unit": dataset.unit,
        "label_range": list(dataset.label_range) if dataset.label_range else None,
        "has_masks": dataset.masks is not None,
        "columns": list(dataset.column_names),
        "counts": {site: {name: len(parts[name]) for name in SPLITS} for site, parts in where.items()},
        "class_counts": {site: by_class(parts) for site, parts in where.items()},
        "digests": digests,
        "mean_ks": mean_ks(train_labels),
        "labels": label_histograms(train_labels, classes),
        **({"pairwise_ks": pairwise_ks(train_labels).round(4).tolist()} if len(where) <= MOST_PAIRED else {}),
    }
