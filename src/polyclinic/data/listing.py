"""A listing of image files with their labels and columns, and its preparation as arrays on disk.

A source makes a listing from folder names, tables or archive headers before any image is read. `prepare_images` reads
the images; a preparation that was stopped goes on where it stopped.
"""

import json
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polyclinic.data.archives import Chain
from polyclinic.data.cache import Progress
from polyclinic.data.doubles import digest_of, thumbnail
from polyclinic.data.pixels import Fit, check_mask, fit_image, fit_mask, is_colour
from polyclinic.data.reading import UNKNOWN_SPACING, Reader
from polyclinic.data.tables import Table
from polyclinic.errors import BadInput
from polyclinic.files import PARTIAL, atomic_file, atomic_write, make_folder

#: the arrays of a listing that have one entry per image
PER_IMAGE = ("labels", "patient", "site", "split", "subgroup", "ids", "columns")
#: what is asked of a listing image by image
FUNCTIONS = ("picture", "name", "mask", "spacing")


@dataclass(frozen=True)
class Listing:
    """N images to be read. Fields are those of `Dataset`, with functions instead of pixels.

    picture   gives the pixels of image i: uint8 [H, W] or [H, W, 3]
    mask      gives the mask of image i: [H, W], anything above zero is inside; None where there are no masks
    spacing   gives the millimetres between columns and between rows of image i; None where no file says so
    name      says what to call image i in a message, e.g. "cases.csv row 17 (scans/a.png)"
    """

    picture: Callable[[int], np.ndarray]
    name: Callable[[int], str]
    labels: np.ndarray
    classes: tuple[str, ...] = ()
    unit: str = ""
    label_range: tuple[float, float] | None = None
    mask: Callable[[int], np.ndarray] | None = None
    patient: np.ndarray | None = None
    site: np.ndarray | None = None
    split: np.ndarray | None = None
    subgroup: np.ndarray | None = None
    ids: np.ndarray | None = None
    columns: np.ndarray | None = None
    column_names: tuple[str, ...] = ()
    spacing: Callable[[int], tuple[float, float]] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: np.ndarray) -> "Listing":
        """The listing of the images at `index`, in that order."""
        index = np.asarray(index, dtype=np.int64)

        def at(function: Callable[[int], Any] | None) -> Callable[[int], Any] | None:
            return None if function is None else lambda i: function(int(index[i]))

        functions = {key: at(getattr(self, key)) for key in FUNCTIONS}
        arrays = {key: array[index] for key, array in self.arrays().items()}
        return replace(self, **functions, **arrays)  # type: ignore[arg-type]

    def arrays(self) -> dict[str, np.ndarray]:
        """The per-image arrays that there are."""
        return {key: getattr(self, key) for key in PER_IMAGE if getattr(self, key) is not None}

    def facts(self) -> dict[str, Any]:
        """The facts that hold for all images, in plain values."""
        bounds = None if self.label_range is None else [float(bound) for bound in self.label_range]
        names = {"column_names": list(self.column_names)} if self.column_names else {}
        return {"classes": list(self.classes), "unit": self.unit, "label_range": bounds, **names}


def listing_of_files(
    files: Sequence[Path],
    names: Sequence[str],
    *,
    change: Callable[[np.ndarray], np.ndarray] = lambda pixels: pixels,
    **facts: Any,
) -> Listing:
    """A listing with one file per image; `change` is done to its pixels, `facts` are fields of `Listing`."""
    reader = Reader()
    return Listing(
        picture=lambda i: change(reader.pixels(files[i])),
        spacing=lambda i: reader.spacing(files[i]),
        name=lambda i: names[i],
        ids=np.array([file.name for file in files]),
        **facts,
    )


def listing_of_parts(
    what: str, parts: Sequence[tuple[str, np.ndarray, np.ndarray]], classes: tuple[str, ...]
) -> Listing:
    """A listing of (split, images [N, H, W] or [N, H, W, 3], labels [N]) that lie in arrays; `what` names them."""
    images = Chain([pixels for _, pixels, _ in parts])
    return Listing(
        picture=lambda i: images[i],
        name=lambda i: f"{what} image {i}",
        labels=np.concatenate([labels for *_, labels in parts]).astype(np.int64),
        classes=classes,
        split=np.repeat([split for split, *_ in parts], images.lengths),
    )


def places(table: Table, files: Sequence[Path]) -> list[str]:
    """The name of the file of each row of a table, for messages."""
    return [f"{table.place(i)} ({file.name})" for i, file in enumerate(files)]


# --- preparation ----------------------------------------------------------------------------------------------


STEP = 64  # images read at a time
NOTED_EVERY = 32  # steps between two notes of progress on disk
LOOKED_AT = 24  # images that are opened to see whether any has colour
NAMED_AT_MOST = 200  # problems in one message
ONE_BY_ONE = 20  # images with the same problem that are still named each
#: what differs between two messages about the same problem
NUMBERS = re.compile(r"[-+]?(?:\d[\d.]*(?:e[-+]?\d+)?|nan|inf)")

#: the name of an image, and why it cannot be read
Problem = tuple[str, str]


def prepare_images(listing: Listing, fit: Fit, folder: Path, progress: Progress | None = None) -> None:
    """Writes images, masks and the listing's facts to `folder`, which appears when all are there.

    The caller holds the folder's lock. An attempt that was stopped lies beside it and is continued. Every image that
    cannot be read is named, with the reason, in one message.
    """
    if len(listing) == 0:
        raise BadInput("data.path: no images found; `polyclinic data show` says what a source must look like")
    if (folder / "facts.json").is_file():  # another process has prepared the same meanwhile
        return
    scratch = folder.with_name(folder.name + PARTIAL)
    make_folder(scratch)
    channels = channels_of(listing, fit)
    images = _open(scratch / "images.npy", (len(listing), channels, fit.size, fit.size))
    masks = None if listing.mask is None else _open(scratch / "masks.npy", (len(listing), fit.size, fit.size))
    geometry = _open(scratch / "geometry.npy", (len(listing), 4), np.float32)
    digests = _open(scratch / "digests.npy", (len(listing),), np.int64)
    _read_all(listing, fit, Arrays(images, masks, geometry, digests), scratch / "done.txt", progress)
    for name, array in listing.arrays().items():
        np.save(scratch / f"{name}.npy", array, allow_pickle=False)
    (scratch / "facts.json").write_text(json.dumps(listing.facts(), indent=1), encoding="utf-8")
    scratch.rename(folder)


class Arrays(NamedTuple):
    """The arrays that are filled image by image. `geometry` float32 [N, 4]: width and height of the file's image in
    pixels, and millimetres between its columns and rows (NaN where nobody says)."""

    images: np.ndarray
    masks: np.ndarray | None
    geometry: np.ndarray
    digests: np.ndarray  #: int64 [N], of what each file shows


def channels_of(listing: Listing, fit: Fit) -> int:
    """The channels asked for; else 3 when any of a few images, taken evenly, has colour."""
    if fit.channels != "auto":
        return fit.channels
    for i in np.unique(np.linspace(0, len(listing) - 1, LOOKED_AT).astype(int)):
        try:
            if is_colour(listing.picture(int(i))):
                return 3
        except Exception:
            continue
    return 1


def _read_all(listing: Listing, fit: Fit, arrays: Arrays, done_file: Path, progress: Progress | None) -> None:
    """Fills the arrays; `done_file` holds how many images, from the first, are safely on disk."""
    done = int(done_file.read_text()) if done_file.exists() else 0
    problems: list[Problem] = []
    images, masks, geometry, digests = arrays

    def read(i: int) -> Problem | None:
        try:
            picture = listing.picture(i)
            images[i], digests[i] = fit_image(picture, fit, images.shape[1]), digest_of(picture)
            geometry[i] = (*picture.shape[1::-1], *(listing.spacing(i) if listing.spacing else UNKNOWN_SPACING))
            if masks is not None and listing.mask is not None:
                masks[i] = fit_mask(listing.mask(i), fit)
        except Exception as error:  # whatever a decoder raises on a broken file is a fact about that file
            return listing.name(i), _reason(error)
        return None

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        for first in range(done, len(listing), STEP):
            stop = min(first + STEP, len(listing))
            problems += [problem for problem in pool.map(read, range(first, stop)) if problem]
            if not problems and (stop % (STEP * NOTED_EVERY) == 0 or stop == len(listing)):
                for array in arrays:  # the pixels are handed to the disk first
                    if isinstance(array, np.memmap):
                        array.flush()
                atomic_write(done_file, str(stop))
            if progress:
                progress("preparing images", stop, len(listing))
    if problems:
        raise BadInput(unreadable(problems, len(listing)))


@dataclass(frozen=True)
class Looked:
    """A look at an image: why it or its mask cannot be read, or what it shows."""

    problem: Problem | None = None
    digest: int = 0
    thumbnail: np.ndarray | None = None


def look_at(listing: Listing, i: int) -> Looked:
    """What is seen of image i; its mask is read, too."""
    try:
        picture = listing.picture(i)
        if listing.mask is not None:
            check_mask(listing.mask(i))
        return Looked(None, digest_of(picture), thumbnail(picture))
    except Exception as error:  # whatever a decoder raises on a broken file is a fact about that file
        return Looked((listing.name(i), _reason(error)))


def _open(file: Path, shape: tuple[int, ...], dtype: type[np.generic] = np.uint8) -> np.ndarray:
    """A writable memory map, taken up again where one of that shape is there."""
    if not file.exists():
        with atomic_file(file) as partial:
            np.lib.format.open_memmap(partial, mode="w+", dtype=dtype, shape=shape)
    return np.lib.format.open_memmap(file, mode="r+")


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


def unreadable(problems: Sequence[Problem], count: int) -> str:
    """A message about images that cannot be read, and why: images with the same problem in one line."""
    alike: dict[str, list[Problem]] = {}
    for name, why in problems:
        alike.setdefault(NUMBERS.sub("#", why), []).append((name, why))
    lines = []
    for group in alike.values():
        if len(group) <= ONE_BY_ONE:
            lines.append("\n  ".join(f"{name}: {why}" for name, why in group))
        else:
            lines.append(f"{len(group)} of {count} images, such as {group[0][0]}: {group[0][1]}")
    named = lines[:NAMED_AT_MOST]
    more = [f"and {len(lines) - len(named)} more"] if len(lines) > len(named) else []
    head = f"data.path: {len(problems)} of {count} images cannot be read; repair or remove them:"
    return "\n  ".join([head, *named, *more])
