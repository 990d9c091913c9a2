"""A site's own volumes, which the gate recognises in what is about to leave."""

from __future__ import annotations

import hashlib
import itertools
import operator
from collections.abc import Iterator
from functools import cached_property

import numpy as np
from torch import Tensor

from polyclinic.data.volumes.volume import Volume


class RawVolumes:
    """Recognises whole volumes, single channels of them and masks, as they were prepared, in any batch or shape.

    As for images, those that were cut, turned or hidden in other numbers are not found: patches, for one. Against these
    stand policy and audit.
    """

    def __init__(self, *volumes: np.ndarray) -> None:
        """`volumes`: arrays of `Volume`s."""
        self._volumes: list[Volume] = [one for some in volumes for one in some]

    @cached_property
    def _sizes(self) -> set[int]:
        """Numbers of voxels of a mask or channel, and of all channels together."""
        shapes = [volume.image.shape for volume in self._volumes]
        return {int(np.prod(shape[start:])) for shape in shapes for start in (0, 1)}

    @cached_property
    def _known(self) -> set[bytes]:
        return {_digest(row) for volume in self._volumes for row in _rows_of(volume) if row.min() < row.max()}

    def found_in(self, tensor: Tensor) -> bool:
        """True if any row of `tensor` is a volume, a channel or a mask of the site."""
        if tensor.is_complex():
            return False
        fitting = self._sizes.intersection(itertools.accumulate(reversed(tensor.shape), operator.mul))
        rows = (row for size in fitting for row in tensor.detach().cpu().reshape(-1, size).float().numpy())
        return any(_digest(row) in self._known for row in rows)


def _rows_of(volume: Volume) -> Iterator[np.ndarray]:
    yield volume.image
    yield from volume.image
    yield volume.mask


def _digest(row: np.ndarray) -> bytes:
    """Of the numbers, whatever their type and shape."""
    return hashlib.blake2b(np.ascontiguousarray(row, dtype=np.float16).data, digest_size=16).digest()
