"""What the frozen layers of a network give for images, computed once and kept beside them.

Twenty rounds on a frozen front then cost one pass through it. The files are keyed by the weights of the front and by
the images (`encoders.kept_features`), so other weights or other images never find them.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from polyclinic.models import Encoded, split
from polyclinic.models.encoders import Encoder, kept_features

if TYPE_CHECKING:
    from polyclinic.models import Backbone


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
        self._front: FrozenFront | None = None
        self._known: dict[tuple[str | None, int], np.ndarray] = {}

    def forget_weights(self) -> None:
        """Other weights may have been loaded into the network."""
        self._front = None

    def of(self, images: np.ndarray) -> np.ndarray:
        """Features float32 [N, ...] of images uint8 [N, C, H, W]; the network then takes them in the images' place."""
        if self._front is None:
            self.model.frozen_shape = None
            self._front = FrozenFront(split(self.model, self.model.frozen[-1])[0], self.device, images.shape[1:])
        front = self._front
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
