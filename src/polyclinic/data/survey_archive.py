"""A first look at an npz archive: which arrays are images, labels, sites and patients, by name and shape."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from polyclinic.data.archives import Archive, as_bytes
from polyclinic.data.datasets.npz import Columns
from polyclinic.data.labels import Labels, are_labels, code_notes, labels_of
from polyclinic.data.survey_cases import Sizes, Survey, Wanted
from polyclinic.data.survey_tables import NAMES, columns_by_name, like_patients_note
from polyclinic.errors import BadInput

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


def survey_archive(path: Path, wanted: Wanted = Wanted()) -> Survey:  # noqa: B008 (frozen)
    """The images of an archive; BadInput where images, or what to learn about them, are missing."""
    archive, shapes = _opened(path)
    wanted.refuse_absent(path, (name.removeprefix("train_") for name in shapes))
    name = wanted.images or _images_or_refusal(path, shapes)
    prefixes = [prefix for prefix in ("", "train_", "val_", "test_") if prefix + name in shapes]
    if not _has_image_shape(shapes[prefixes[0] + name]):
        raise BadInput(f"--images: '{name}' of {path} has the shape {list(shapes[prefixes[0] + name])}, no images'")
    images = sum(shapes[prefix + name][0] for prefix in prefixes)
    if not images:
        raise BadInput(f"--for {path}: '{name}' holds no image; save the images and their labels in it first")
    arrays = {
        own: np.concatenate([archive[prefix + own].reshape(-1) for prefix in prefixes])
        for own in _flat_arrays(shapes, prefixes, name)
    }
    height, width = _sides(shapes[prefixes[0] + name])
    columns = {"images": name, **_named(arrays)}
    if wanted.label:
        _refuse_other_length(path, wanted.label, arrays)
        columns["labels"] = wanted.label
    masks = _masks(shapes, prefixes[0], images=name)
    if masks and not wanted.label:
        columns["masks"] = masks
    found, gaps = _labels(path, arrays, columns, shapes)
    codes = code_notes([str(value) for value in arrays[columns["labels"]].tolist()]) if "labels" in columns else ()
    notes = (*gaps, *codes, *like_patients_note(columns.get("group", "")), *_floats(archive.first(prefixes[0] + name)))
    return Survey(
        path=path,
        source="npz",
        labels=found,
        images=images,
        sizes=Sizes.one(int(width), int(height)),
        columns=columns,
        sites=dict(Counter(map(str, arrays[columns["site"]].tolist()))) if "site" in columns else {},
        patients=len(np.unique(arrays[columns["group"]])) if "group" in columns else None,
        notes=notes,
        keeps_classes=found.task == "classification" and bool(gaps),
    )


def _opened(path: Path) -> tuple[Archive, Shapes]:
    try:
        archive = Archive(path)
        return archive, {name: archive.shape(name) for name in archive}
    except BadInput as error:
        raise BadInput(f"--for {path}: is no NumPy archive that can be read ({error})") from None


def _images(shapes: Shapes) -> str | None:
    """The name of the images, without what stands for the split in MedMNIST's layout."""
    names = {own.removeprefix("train_"): own for own in shapes if len(shapes[own]) >= 3}
    return next((own for wanted in IMAGES for own in names if own.lower() == wanted), None)


def _images_or_refusal(path: Path, shapes: Shapes) -> str:
    """The name of the images: one of the usual names, else that of the only array that can be images."""
    fit = _candidates(shapes)
    if len(fit) == 1:
        return fit[0]
    why = f"several arrays can be images ({', '.join(fit)})" if fit else "no array has images [N, H, W]"
    cure = f"name them: --images {fit[0]}" if fit else "save the images of one size as one array"
    raise BadInput(f"--for {path}: {why}; it has {_listed(shapes)}; {cure}")


def _candidates(shapes: Shapes) -> list[str]:
    """Names of arrays that can be the images; the one with a usual name alone, where there is one."""
    if name := _images(shapes):
        return [name]
    fit = {own.removeprefix("train_") for own in shapes if _can_be_images(own, shapes[own])}
    return sorted(own for own in fit if not own.startswith(("val_", "test_")))


def pictures_in(path: Path) -> Iterator[np.ndarray]:
    """The images of an archive, uint8 [H, W] or [H, W, 3] each; BadInput where nobody can say which array they are."""
    archive, shapes = _opened(path)
    fit = _candidates(shapes)
    if len(fit) != 1:
        raise BadInput(f"which array are the images? it has {_listed(shapes)}; call them images")
    images = Columns(archive, fit[0]).images
    return (as_bytes(images[number]) for number in range(len(images)))


def _can_be_images(name: str, shape: tuple[int, ...]) -> bool:
    """An array of images large enough, and no masks."""
    return _has_image_shape(shape) and min(_sides(shape)) >= SMALLEST and not MASKS.search(name)


def _sides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Height and width."""
    return shape[2:] if len(shape) == 4 and shape[1] in (1, 3) else shape[1:3]


def _has_image_shape(shape: tuple[int, ...]) -> bool:
    """[N, H, W], [N, H, W, C] or [N, C, H, W]."""
    return len(shape) == 3 or (len(shape) == 4 and (shape[1] in (1, 3) or shape[3] in (1, 3)))


def _masks(shapes: Shapes, prefix: str, images: str) -> str:
    """The array of masks: one of the usual names, else the only one with masks in its name; '' where there is none."""
    named = [own.removeprefix(prefix) for own, shape in shapes.items() if own.startswith(prefix) and len(shape) >= 3]
    others = [own for own in named if MASKS.search(own) and own != images]
    usual = [own for own in ("masks", "mask") if own in others]
    return usual[0] if usual else others[0] if len(others) == 1 else ""


def _refuse_other_length(path: Path, label: str, arrays: Mapping[str, np.ndarray]) -> None:
    if label not in arrays:
        raise BadInput(
            f"--label: '{label}' of {path} has not one entry for each image; choose from {', '.join(arrays)}"
        )


def _flat_arrays(shapes: Shapes, prefixes: Sequence[str], images: str) -> list[str]:
    """Arrays with one entry for each image."""
    names = [own.removeprefix(prefixes[0]) for own in shapes if own.startswith(prefixes[0])]
    return [own for own in names if own != images and all(_fits(shapes, prefix, own, images) for prefix in prefixes)]


def _fits(shapes: Shapes, prefix: str, name: str, images: str) -> bool:
    count = shapes[prefix + images][0]
    return shapes.get(prefix + name) in ((count,), (count, 1))


def _named(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Arrays by the settings that name them."""
    return {SETTINGS.get(what, what): name for what, name in columns_by_name(arrays, ARRAYS, near=("label",)).items()}


def _labels(
    path: Path, arrays: Mapping[str, np.ndarray], columns: dict[str, str], shapes: Shapes
) -> tuple[Labels, tuple[str, ...]]:
    if "masks" in columns:
        columns.pop("labels", None)
        return Labels.masks(), ()
    if "labels" not in columns:
        raise BadInput(
            f"--for {path}: no array looks like labels [N] or masks; it has {_listed(shapes)}; --label names one"
        )
    texts = [str(value) for value in arrays[columns["labels"]].tolist()]
    found = labels_of(texts)
    return found, _gaps(texts, found.task)


def _listed(shapes: Shapes) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items()) or "none"


def _floats(first: np.ndarray) -> tuple[str, ...]:
    """A note where the first image has floats that a study does not take."""
    if not np.issubdtype(first.dtype, np.floating) or not len(first) or (first.min() >= 0 and first.max() <= 1):
        return ()
    cure = "divide them by 255, or save them as uint8" if first.min() >= 0 and first.max() <= 255 else "scale them"
    seen = f"from {first.min():g} to {first.max():g}"
    return (f"the images are floats {seen}, and a study takes floats from 0 to 1, or uint8: {cure} before you run it",)


def _gaps(texts: Sequence[str], task: str) -> tuple[str, ...]:
    """A note about images of an archive that have no label; a study can leave them out where labels are classes."""
    gaps = [number for number, label in enumerate(are_labels(texts)) if not label]
    if not gaps:
        return ()
    count = "1 image has" if len(gaps) == 1 else f"{len(gaps)} images have"
    such = f"image {gaps[0]}: '{texts[gaps[0]]}'"
    cure = "data.keep leaves them out" if task == "classification" else "take them out of the archive before you run it"
    return (f"{count} no label ({such}, counted from 0); {cure}",)
