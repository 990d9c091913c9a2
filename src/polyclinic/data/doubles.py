"""Images that lie: the same one twice, or nearly, under other classes, sites or splits; several labels."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image

THUMBNAIL = 16  #: side of what is compared of two images that may be nearly the same
#: correlation of two thumbnails from which on images are called nearly alike: an image that was saved again as JPEG at
#: quality 50, or at half its size, has .995 and more
ALIKE = 0.995
#: share of the images that have a near double, above which they are alike by nature, as digits are
BY_NATURE = 0.1
NAMED = 4  #: doubles in a sentence
READ_AT_MOST = 1000  #: files of a size that others have, above which a first look leaves them to `study check`


def digest_of(pixels: np.ndarray) -> int:
    """A number for what an image shows, below 2^63; 0 for an image of one colour, which shows nothing."""
    if pixels.size == 0 or pixels.min() == pixels.max():
        return 0
    about = f"{pixels.shape}{pixels.dtype}".encode() + np.ascontiguousarray(pixels).tobytes()
    return int.from_bytes(hashlib.blake2b(about, digest_size=8).digest(), "big") >> 1


def digests_of_files(files: Sequence[Path]) -> np.ndarray:
    """int64 [N]: a number for the bytes of each file; 0 where no other has its size, or too many have."""
    sizes = [file.stat().st_size for file in files]
    shared = {size for size, count in Counter(sizes).items() if count > 1}
    if sum(size in shared for size in sizes) > READ_AT_MOST:
        shared = set()
    read = [file.read_bytes() if size in shared else b"" for file, size in zip(files, sizes, strict=True)]
    return np.array([digest_of(np.frombuffer(one, np.uint8)) for one in read], np.int64)


def twins(digests: np.ndarray) -> np.ndarray:
    """int64 [N]: for each image the number of the first one that is the same; its own where there is none before."""
    own = np.arange(len(digests))
    _, first, which = np.unique(digests, return_index=True, return_inverse=True)
    return np.where(np.asarray(digests) == 0, own, first[which.reshape(-1)])


def thumbnail(pixels: np.ndarray) -> np.ndarray:
    """float32 [256]: a small grey copy, without its mean and of length one; zeros for an image of one colour."""
    small = Image.fromarray(pixels).convert("L").resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BOX)
    values = np.asarray(small, dtype=np.float32).ravel()
    values = values - values.mean()
    return values / max(float(np.linalg.norm(values)), 1e-6)


def near_doubles(thumbnails: np.ndarray, digests: np.ndarray) -> list[tuple[int, int]]:
    """Pairs of images that are nearly, and not quite, the same; none where images are alike by nature."""
    alike = np.triu(thumbnails @ thumbnails.T >= ALIKE, 1) & (digests[:, None] != digests[None])
    pairs = np.argwhere(alike)
    return [(int(i), int(k)) for i, k in pairs] if len(np.unique(pairs)) <= BY_NATURE * len(digests) else []


def said_of_doubles(digests: np.ndarray, names: Sequence[str], columns: Mapping[str, Sequence[str]]) -> list[str]:
    """A sentence about the images that are there more than once: a WARNING for those that differ in one of `columns`,
    by what it holds (class, site, split)."""
    which = twins(digests)
    groups = [np.flatnonzero(which == first) for first in np.unique(which[which != np.arange(len(which))])]
    if not groups:
        return []

    def named(some: Sequence[np.ndarray]) -> str:
        shown = [" = ".join(names[i] for i in one[:3].tolist()) for one in some[:NAMED]]
        return "; ".join([*shown, *([f"and {len(some) - NAMED} more"] if len(some) > NAMED else [])])

    said = []
    for what, values in columns.items():
        differ = [one for one in groups if len({values[i] for i in one.tolist()}) > 1]
        if differ:
            images = "1 image is" if len(differ) == 1 else f"{len(differ)} images are"
            said.append(f"WARNING: {images} there more than once, with another {what}: {named(differ)}")
    many = sum(len(one) - 1 for one in groups)
    kept = "they stay in one split, unless the source fixes it"
    said += [] if said else [f"{many} image{'s are' if many > 1 else ' is'} there twice: {named(groups)}; {kept}"]
    return said


def several_labels(classes: Sequence[str]) -> str:
    """A class that names several others, as `mass|cyst` does where both are there; nothing where none does."""
    for sign in "|;,+&":
        parts = {name: [part.strip() for part in name.split(sign)] for name in classes if sign in name}
        known = {name.strip() for name in classes if sign not in name}
        for name, own in parts.items():
            others = known | {part for other, some in parts.items() if other != name for part in some}
            if all(own) and (sign == "|" or all(part in others for part in own)):
                return name
    return ""


def two_labels(paths: Sequence[str], labels: Sequence[str]) -> tuple[int, int] | None:
    """Two rows that give one file two labels; None where there are none."""
    order = sorted(range(len(paths)), key=lambda row: (paths[row], row))
    return next(((i, k) for i, k in pairwise(order) if paths[i] == paths[k] and labels[i] != labels[k]), None)
