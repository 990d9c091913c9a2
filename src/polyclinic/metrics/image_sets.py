"""Sets of images for metrics and attacks: checked, scaled to [0, 1], flipped and turned."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from polyclinic.errors import BadInput

Images = Tensor | np.ndarray

#: the eight ways to lay a square picture on itself, and what undoes nothing else than a flip or quarter turns
ORIENTATIONS = (
    "as it is",
    "turned by 90 degrees",
    "turned by 180 degrees",
    "turned by 270 degrees",
    "mirrored",
    "mirrored and turned by 90 degrees",
    "mirrored and turned by 180 degrees",
    "mirrored and turned by 270 degrees",
)


def as_unit(images: Images, what: str = "images") -> Tensor:
    """Images [N, C, H, W], C 1 or 3, as float32 in [0, 1]; uint8 is divided by 255. `what` names them in messages."""
    found = torch.as_tensor(np.asarray(images).copy() if isinstance(images, np.ndarray) else images)
    if found.dim() != 4 or found.shape[1] not in (1, 3) or not len(found):
        raise BadInput(f"{what}: have shape {tuple(found.shape)}; give [N, C, H, W] with one or three channels")
    if found.dtype == torch.uint8:
        return found.float() / 255
    if not found.is_floating_point() or not bool(found.isfinite().all()):
        raise BadInput(f"{what}: are {found.dtype}, or not finite; give uint8, or float between 0 and 1")
    return found.float()


def same_shape(first: Tensor, second: Tensor, what: str) -> None:
    """Raise BadInput unless both sets hold images of one shape."""
    if first.shape[1:] != second.shape[1:]:
        raise BadInput(
            f"{what}: have shape {tuple(second.shape[1:])} where {tuple(first.shape[1:])} was expected; resize them"
        )


def turned(images: Tensor, orientation: int) -> Tensor:
    """Images laid down in the orientation ORIENTATIONS[orientation]: mirrored left-right first, then turned."""
    mirrored, quarters = divmod(orientation, 4)
    found = images.flip(-1) if mirrored else images
    return found.rot90(quarters, (-2, -1))


def orientations_of(images: Tensor) -> tuple[int, ...]:
    """Which orientations keep the shape of these images: all eight, or four where they are not square."""
    return tuple(range(8)) if images.shape[-1] == images.shape[-2] else (0, 2, 4, 6)


def digest(image: Tensor) -> str:
    """A name for one image by its pixels, so that what is drawn for it does not depend on its place in a set."""
    return hashlib.sha256(image.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:16]
