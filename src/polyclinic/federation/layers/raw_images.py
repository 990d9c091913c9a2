"""Recognises a site's own images in a tensor."""

from __future__ import annotations

import hashlib
import math
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


class RawImages:
    """Recognises a site's own images in a tensor: as bytes, or as numbers in [0, 1] or [0, 255].

    It finds whole images, whatever the parcel calls them, in a batch, flattened, or without a channel axis of
    length one. It does not find images that were cropped, flipped, resized, blurred or hidden in other numbers:
    against those stand policy and audit.
    """

    def __init__(self, *images: np.ndarray) -> None:
        """`images`: uint8 [N, C, H, W], all of one shape, perhaps in several arrays."""
        self._images = images
        self._shape = images[0].shape[1:]
        self._fitting: dict[tuple[int, ...], bool] = {}  # shapes of tensors, and whether they can hold an image

    def found_in(self, tensor: Tensor) -> bool:
        """True if any row of `tensor` is one of the site's images."""
        if not self._has_rows(tensor.shape) or tensor.is_complex() or not tensor.numel():
            return False
        rows = tensor.detach().cpu().reshape(-1, math.prod(self._shape))
        return any(digest in self._known for digest in map(_digest, _as_bytes(rows)))

    def _has_rows(self, shape: tuple[int, ...]) -> bool:
        """Whether the last axes of a tensor make up an image."""
        if shape not in self._fitting:
            size = math.prod(self._shape)
            self._fitting[shape] = any(math.prod(shape[axis:]) == size for axis in range(len(shape)))
        return self._fitting[shape]

    @cached_property
    def _known(self) -> set[bytes]:
        # an image of one colour shows nobody, and would be found in any row of zeros
        return {_digest(image) for images in self._images for image in images if image.min() < image.max()}


def _digest(image: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(image).data, digest_size=16).digest()


def _as_bytes(rows: Tensor) -> np.ndarray:
    """Rows [N, D] as the uint8 images they would be on disk: a row without a number above 1 is one in [0, 1]."""
    if rows.dtype == torch.uint8:
        return rows.numpy()
    values = rows.double()
    scale = torch.where(values.amax(1, keepdim=True) <= 1, 255.0, 1.0)
    return (values * scale).round().clamp(0, 255).to(torch.uint8).numpy()
