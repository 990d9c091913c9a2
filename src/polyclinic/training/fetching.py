"""Images of a part on their way to the device: with labels and masks, or as what frozen layers give for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from polyclinic.training.device_images import DeviceImages
from polyclinic.training.frozen_features import FrozenFeatures

if TYPE_CHECKING:
    from polyclinic.data.parts import ImageSet
    from polyclinic.models import Backbone

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
            self._frozen.forget_weights()

    def fetch(self, part: ImageSet, index: np.ndarray, *, augmented: bool) -> Fetched:
        """The images at `index`, on the device."""
        if self._takes_features(augmented):
            rows = self._rows(self.latents(part.images), index)
        elif self._images is None:
            rows = torch.from_numpy(part.images[index]).float().div_(255)
        else:
            rows = self._images.images(part.images, index).float().div_(255)
        masks = self._rows(part.masks, index) if self.dense and part.masks is not None else None
        return rows, self._rows(part.labels, index), masks

    def image_size(self, part: ImageSet, *, augmented: bool) -> int:
        """Numbers of one image as it is fetched: its pixels, or what the frozen layers give for it."""
        return int((self.latents(part.images) if self._takes_features(augmented) else part.images)[0].size)

    def latents(self, images: np.ndarray) -> np.ndarray:
        """What the frozen layers give for images uint8 [N, C, H, W]: float32 [N, c, h, w], kept where that can be."""
        assert self._frozen is not None, "the study's checks want frozen layers (model.freeze)"
        return self._frozen.of(images)

    def _takes_features(self, augmented: bool) -> bool:
        return self._frozen is not None and not augmented

    def _rows(self, array: np.ndarray, index: np.ndarray) -> Tensor:
        if self._images is None:
            return torch.from_numpy(np.asarray(array[index]))
        return self._images.rows(array, index)
