"""Images of sites on a GPU: kept there as bytes where they fit, and copied batch by batch where they do not.

The rule: arrays are kept in the order in which they are first used, up to a quarter of the GPU's memory in all. What
is kept is read from disk and copied once; a batch is then a selection by index on the GPU. Other batches cross from
pinned memory, beside the GPU's work. The numbers are the same either way.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Hashable

import numpy as np
import torch
from torch import Tensor

#: the share of a GPU's memory that sites' images may take
SHARE = 0.25
#: smaller copies CUDA stages itself, without waiting for the GPU
STAGED = 2**16


class DeviceImages:
    """Rows of arrays as tensors on a device. `room`: bytes that may stay there."""

    def __init__(self, device: torch.device, room: int) -> None:
        self.device, self.room = device, room
        self.bytes = 0
        self._kept: dict[Hashable, Tensor] = {}

    @classmethod
    def on(cls, device: torch.device) -> DeviceImages:
        """With the room that a GPU has for images."""
        return cls(device, int(SHARE * torch.cuda.get_device_properties(device).total_memory))

    def images(self, array: np.ndarray, index: np.ndarray) -> Tensor:
        """The images at `index` of uint8 [N, C, H, W], channels last in memory."""
        kept = self._keep(array, channels_last=True)
        if kept is None:
            return self._copy(array[index]).contiguous(memory_format=torch.channels_last)
        return kept[self._copy(index)].permute(0, 3, 1, 2)

    def rows(self, array: np.ndarray, index: np.ndarray) -> Tensor:
        """The rows at `index` of any array, such as labels or masks."""
        kept = self._keep(array)
        return self._copy(array[index]) if kept is None else kept[self._copy(index)]

    def _keep(self, array: np.ndarray, *, channels_last: bool = False) -> Tensor | None:
        """The whole array on the device; None where it does not fit."""
        key = _key(array)
        if key not in self._kept:
            if self.bytes + array.nbytes > self.room:
                return None
            whole = np.ascontiguousarray(array.transpose(0, 2, 3, 1) if channels_last else array)
            self._kept[key] = torch.from_numpy(whole.copy()).to(self.device)
            self.bytes += array.nbytes
            if key == id(array):
                weakref.finalize(array, self._forget, key, array.nbytes)
        return self._kept[key]

    def _forget(self, key: Hashable, size: int) -> None:
        del self._kept[key]
        self.bytes -= size

    def _copy(self, array: np.ndarray) -> Tensor:
        found = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cuda" and found.nbytes > STAGED:
            found = found.pin_memory()
        return found.to(self.device, non_blocking=True)


def _key(array: np.ndarray) -> Hashable:
    """What an array is known by: a file that is mapped whole by its name, since a site may be closed and opened again;
    any other array by itself."""
    if isinstance(array, np.memmap) and isinstance(array.base, mmap.mmap):
        return str(array.filename)
    return id(array)
