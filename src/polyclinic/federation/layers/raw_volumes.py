"""A site's own volumes, which the gate recognises in what is about to leave."""

import itertools
import operator
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyclinic.data.volumes.volume import Volume

#: voxels that are looked at first, of all and of those that are not 0 each
SKETCH = 512
#: share of a row's variance that a volume must explain to be found in it
ALIKE = 0.99


class _Known(NamedTuple):
    """Where to look for a volume's channels, channel or mask, and orthonormal columns [places, d] for what is there."""

    volume: int
    part: int
    places: Tensor
    columns: Tensor


class RawVolumes:
    """Recognises whole volumes, single channels of them and masks, as they were prepared, in any batch and shape, in
    numbers of any type, scale and offset; of masks any structures.

    As for images, those that were cut, turned or hidden in other numbers are not found: patches, for one. Against these
    stand policy and audit.
    """

    def __init__(self, *volumes: np.ndarray) -> None:
        """`volumes`: arrays of `Volume`s."""
        self._volumes: list[Volume] = [one for some in volumes for one in some]

    @cached_property
    def _known(self) -> dict[int, list[_Known]]:
        """What is looked for in rows of so many numbers."""
        found: dict[int, list[_Known]] = {}
        for number, volume in enumerate(self._volumes):
            for part, row in enumerate(_rows_of(volume)):
                filled = np.flatnonzero(row)
                spread = (some[:: len(some) // SKETCH + 1] for some in (np.arange(row.size), filled))
                places = np.unique(np.concatenate(list(spread)))
                columns = _columns(torch.from_numpy(row[places]))
                if columns.numel():
                    found.setdefault(row.size, []).append(_Known(number, part, torch.from_numpy(places), columns))
        return found

    def found_in(self, tensor: Tensor) -> bool:
        """True if any row of `tensor` is a volume, a channel or a mask of the site."""
        if not tensor.numel():
            return False
        values = tensor.detach().cpu()
        if values.is_complex():
            values = torch.view_as_real(values.resolve_conj()).movedim(-1, 0)
        return any(
            self._is(one, rows[alike])
            for size in self._known.keys() & set(itertools.accumulate(reversed(values.shape), operator.mul))
            for rows in [values.reshape(-1, size)]
            for one in self._known[size]
            if (alike := _explained(rows[:, one.places], one.columns) > ALIKE).any()
        )

    def _is(self, known: _Known, rows: Tensor) -> bool:
        """Whether one of these rows, which are alike where one looked first, is alike everywhere."""
        row = next(itertools.islice(_rows_of(self._volumes[known.volume]), known.part, None))
        return bool((_explained(rows, _columns(torch.from_numpy(row))) > ALIKE).any())


def _rows_of(volume: Volume) -> Iterator[np.ndarray]:
    for row in (volume.image, *volume.image, volume.mask):
        yield np.array(row).reshape(-1)


def _columns(row: Tensor) -> Tensor:
    """Orthonormal columns, float64 [N, d], of the numbers of a volume less their mean, or of the values of a mask; none
    where all are the same, which shows nobody."""
    groups = torch.unique(row)[1:, None] if row.dtype == torch.uint8 else None
    wide = row.double()[:, None] if groups is None else (row == groups).double().T
    columns: Tensor = torch.linalg.qr(wide - wide.mean(0))[0]
    return columns if row.min() < row.max() else columns[:, :0]


def _explained(rows: Tensor, columns: Tensor) -> Tensor:
    """The share of the variance of each row, float64 [R], that lies in `columns`."""
    centred = rows.double() - rows.double().mean(1, keepdim=True)
    whole = centred.square().sum(1)
    return (centred @ columns).square().sum(1) / whole.clamp(min=torch.finfo(torch.float64).tiny)
