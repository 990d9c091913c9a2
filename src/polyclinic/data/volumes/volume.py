"""A volume as it is read, and as it is prepared and kept."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

#: a structure's values in a mask, by its name; a voxel of several structures has a value that each of them names
Structures = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class RawVolume:
    """A case as its files have it.

    image   float32 [C, X, Y, Z]
    mask    uint8 [X, Y, Z] of values that structures name, 0 elsewhere; or None
    affine  float64 [4, 4], from voxels to millimetres to the right, front and head
    """

    image: np.ndarray
    mask: np.ndarray | None
    affine: np.ndarray

    @property
    def spacing(self) -> tuple[float, ...]:
        """Millimetres between voxels along each axis."""
        return tuple(np.linalg.norm(self.affine[:3, :3], axis=0).tolist())

    def origin(self) -> dict[str, Any]:
        """What a prepared case says of its files (`Volume.origin`)."""
        import nibabel

        order = np.argsort(nibabel.io_orientation(self.affine)[:, 0])
        known = [some[some != 0] for some in self.image]
        levels = [np.percentile(some, (1, 50, 99)).round(3).tolist() if len(some) else [0.0] * 3 for some in known]
        shape, spacing = np.array(self.image.shape[1:])[order], np.array(self.spacing)[order]
        return {"shape": shape.tolist(), "spacing": spacing.tolist(), "intensities": levels}


@dataclass(frozen=True, eq=False)
class Volume:
    """A prepared case. Files are mapped when somebody looks at them, so that a thousand cases hold none open."""

    image_at: Path | np.ndarray
    mask_at: Path | np.ndarray | None
    spacing: tuple[float, ...]
    #: of the case as its files have it, turned to right, front and head: shape, spacing, and of each channel the
    #: intensities at 1, 50 and 99 % of what is not 0
    origin: Mapping[str, Any] = field(default_factory=dict)

    @property
    def image(self) -> np.ndarray:
        """float16 [C, X, Y, Z]."""
        return _opened(self.image_at)

    @property
    def mask(self) -> np.ndarray:
        """uint8 [X, Y, Z]; without one, nothing is a structure."""
        return np.zeros(self.image.shape[1:], np.uint8) if self.mask_at is None else _opened(self.mask_at)

    def digest(self) -> str:
        """Names what the case shows, and in which voxels."""
        found = hashlib.sha256(repr(self.spacing).encode())
        for array in (self.image, self.mask):
            found.update(f"{array.dtype} {array.shape}".encode())
            found.update(np.ascontiguousarray(array).data)
        return found.hexdigest()


def _opened(place: Path | np.ndarray) -> np.ndarray:
    return place if isinstance(place, np.ndarray) else np.load(place, mmap_mode="r", allow_pickle=False)


def rows_of(volumes: Sequence[Volume]) -> np.ndarray:
    """Cases as an array of objects [N], which can be indexed as images are."""
    rows = np.empty(len(volumes), dtype=object)
    for place, volume in enumerate(volumes):
        rows[place] = volume
    return rows


def are_volumes(images: np.ndarray) -> bool:
    """Whether examples are volumes, and not images of one shape."""
    return images.dtype == object


def bytes_of(images: np.ndarray) -> bytes | memoryview:
    """What names the content of images, or of volumes."""
    if are_volumes(images):
        return "".join(volume.digest() for volume in images).encode()
    return np.ascontiguousarray(images).data


def pixels_of(images: np.ndarray) -> int:
    """The pixels of an image, without its channels; of volumes, the voxels of the largest."""
    if are_volumes(images):
        return max((int(np.prod(volume.image.shape[1:])) for volume in images), default=0)
    return int(np.prod(images.shape[2:]))
