"""Mini-batches of a site's images: endless, shuffled; and how their images come to the device, with labels and masks,
or as what frozen layers give for them.

On a GPU, arrays are kept as bytes in the order in which they are first used, up to a quarter of its memory in all. What
is kept is read from disk and copied once; a batch is then a selection by index. Other batches cross from pinned memory,
beside the GPU's work. The numbers are the same either way.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import weakref
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from polyclinic.federation.collaborators import Batch, OptimizerLike
from polyclinic.models import Encoded, split
from polyclinic.models.encoders import Encoder, kept_features

if TYPE_CHECKING:
    from polyclinic.data.parts import ImageSet
    from polyclinic.models import Backbone


def shuffled_indices(part: ImageSet, optimizer: OptimizerLike, rng: torch.Generator) -> Iterator[Tensor]:
    """Endless shuffled mini-batches as indices of images, int64 [B].

    Each pass is a new permutation; its incomplete last batch is left out, as floor(|D| / b) has it. With
    `balanced_batches` a pass draws as many images with replacement, the classes alike.
    """
    size = min(optimizer.batch_size, len(part))
    if optimizer.balanced_batches:  # a weight for each image, by which every class that occurs is drawn equally often
        _, members, counts = np.unique(part.labels, return_inverse=True, return_counts=True)
        shares = torch.from_numpy(1.0 / counts[members])
    while True:
        if optimizer.balanced_batches:
            order = torch.multinomial(shares, len(part), replacement=True, generator=rng)
        else:
            order = torch.randperm(len(part), generator=rng)
        yield from order[: len(part) // size * size].split(size)


@dataclass(frozen=True)
class ReplayedBatches:
    """An endless stream of replayed mini-batches, `size` images each."""

    stream: Iterator[Batch]
    size: int

    def join(self, real: Iterator[Batch]) -> Iterator[Batch]:
        """Each real mini-batch with the next replayed one behind it."""
        for (images, targets), (more, others) in zip(real, self.stream, strict=False):
            yield torch.cat([images, more]), torch.cat([targets, others])


# --- images of a batch ----------------------------------------------------------------------------


#: images in [0, 1] or features in their place, labels, and masks where the task needs them
Fetched = tuple[Tensor, Tensor, Tensor | None]


class ImageFetcher:
    """What fetches images for one network. `dense`: with masks. `frozen_features`: what the network's frozen layers
    give for images is kept, and comes in their place unless they are `augmented`."""

    def __init__(self, model: Backbone, device: torch.device, *, dense: bool, frozen_features: bool) -> None:
        self.dense = dense
        self._images = DeviceImages.on(device) if device.type == "cuda" else None
        self._frozen = FrozenFeatures(model, device) if frozen_features and model.frozen else None

    def forget_weights(self) -> None:
        """Other weights may have been loaded into the network."""
        if self._frozen is not None:
            self._frozen.front = None

    def fetch(self, part: ImageSet, index: np.ndarray, *, augmented: bool) -> Fetched:
        """The images at `index`, on the device."""
        if self._frozen is not None and not augmented:
            rows = self._rows(self._frozen.of(part.images), index)
        elif self._images is None:
            rows = torch.from_numpy(part.images[index]).float().div_(255)
        else:
            rows = self._images.images(part.images, index).float().div_(255)
        masks = self._rows(part.masks, index) if self.dense and part.masks is not None else None
        return rows, self._rows(part.labels, index), masks

    def latents(self, images: np.ndarray) -> np.ndarray:
        """What the frozen layers give for images uint8 [N, C, H, W]: float32 [N, c, h, w], kept where that can be."""
        assert self._frozen is not None, "the study's checks want frozen layers (model.freeze)"
        return self._frozen.of(images)

    def _rows(self, array: np.ndarray, index: np.ndarray) -> Tensor:
        if self._images is None:
            return torch.from_numpy(np.asarray(array[index]))
        return self._images.rows(array, index)


# --- images on a GPU ------------------------------------------------------------------------------


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


# --- frozen layers --------------------------------------------------------------------------------


class FrozenFront(Encoder):
    """The frozen stages of a network as an encoder. `shape` is that of what they give for one image."""

    def __init__(self, front: Backbone, device: torch.device, image_shape: tuple[int, ...]) -> None:
        super().__init__(device)
        self.front = front.eval()
        with torch.no_grad():
            self.shape = tuple(self.front(torch.zeros(1, *image_shape, device=device)).shape[1:])
        self.width = math.prod(self.shape)  # type: ignore[misc]  # of this network, and not of all
        self._identity = identity_of(front, device)

    @property
    def identity(self) -> str | None:
        return self._identity

    @torch.no_grad()
    def of_unit(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, enabled=False):
            return self.front.eval()(images).float().flatten(1)

    def encode(self, images: Tensor) -> Tensor:
        return self.of_unit(images)


class FrozenFeatures:
    """Rows of features of the images of any part, for a network whose first stages are frozen."""

    def __init__(self, model: Backbone, device: torch.device) -> None:
        self.model, self.device = model, device
        self.front: FrozenFront | None = None  # None where other weights may have been loaded
        self._known: dict[tuple[str | None, int], np.ndarray] = {}

    def of(self, images: np.ndarray) -> np.ndarray:
        """Features float32 [N, ...] of images uint8 [N, C, H, W]; the network then takes them in the images' place."""
        front = self.front
        if front is None:
            self.model.frozen_shape = None
            front = FrozenFront(split(self.model, self.model.frozen[-1])[0], self.device, images.shape[1:])
            self.front = front
        self.model.frozen_shape = front.shape
        key = (front.identity, id(images))
        if key not in self._known:
            self._known[key] = kept_features(front, images).reshape(len(images), *front.shape)
            weakref.finalize(images, self._known.pop, key, None)
        return self._known[key]


def identity_of(front: Backbone, device: torch.device) -> str | None:
    """A digest of all that the features depend on besides the images; None where an encoder does not tell."""
    total = hashlib.sha256(f"{front.name} {front.present} {front.resized_to}".encode())
    if isinstance(front, Encoded):
        encoder = front.features.encoder(device)
        return encoder.identity and f"{front.name} {encoder.image_side} {encoder.identity}"
    for name, tensor in front.state_dict().items():
        total.update(name.encode() + tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
