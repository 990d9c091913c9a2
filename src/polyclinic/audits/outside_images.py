"""Images of anybody's: a folder of files, read to one size, with the names of its sub-folders as classes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from polyclinic.data.reading import Reader, is_image_name
from polyclinic.errors import BadInput

MOST = 5000  #: images of one folder


@dataclass(frozen=True)
class OutsideImages:
    """images uint8 [N, C, H, W]; labels int64 [N], or none where the folder has no folders for classes."""

    images: Tensor
    labels: Tensor | None
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.images)


def read_folder(
    folder: Path, flag: str, *, size: int | None = None, channels: int | None = None, classes: tuple[str, ...] = ()
) -> OutsideImages:
    """All images below a folder, in the order of their names. Without a size, that of the first image, as a square.

    `classes`: names that the labels must have, where another folder has set them.
    """
    if not folder.is_dir():
        raise BadInput(f"{flag}: '{folder}' is no folder; name a folder with images")
    files = sorted(file for file in folder.rglob("*") if file.is_file() and is_image_name(file))
    if len(files) > MOST:
        raise BadInput(
            f"{flag}: '{folder}' holds {len(files)} images; at most {MOST} are compared, so name a part of it"
        )
    if not files:
        raise BadInput(f"{flag}: '{folder}' holds no images; name a folder with PNG, JPEG, DICOM or NIfTI files")
    pixels = [_read(file, flag) for file in files]
    channels = channels or (3 if pixels[0].ndim == 3 else 1)
    side = size or min(pixels[0].shape[:2])
    images = np.stack([_as_channels(one, side, channels) for one in pixels])
    names = [file.relative_to(folder).parts[0] if file.parent != folder else "" for file in files]
    found = tuple(sorted(set(names)))
    if "" in found:
        return OutsideImages(torch.from_numpy(images), None, ())
    return OutsideImages(torch.from_numpy(images), _labels(names, classes or found, flag), classes or found)


def _labels(names: list[str], classes: tuple[str, ...], flag: str) -> Tensor:
    for name in names:
        if name not in classes:
            raise BadInput(f"{flag}: the class '{name}' is not among {', '.join(classes)}; rename its folder")
    return torch.tensor([classes.index(name) for name in names])


def _read(file: Path, flag: str) -> np.ndarray:
    try:
        return Reader().pixels(file)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadInput(f"{flag}: '{file}' cannot be read ({error}); repair or remove it") from None


def _as_channels(pixels: np.ndarray, side: int, channels: int) -> np.ndarray:
    """uint8 [C, side, side]."""
    mode = "RGB" if channels == 3 else "L"
    picture = Image.fromarray(pixels).convert(mode)
    if picture.size != (side, side):
        picture = picture.resize((side, side), Image.Resampling.BILINEAR)
    found = np.asarray(picture)
    return found[None] if channels == 1 else found.transpose(2, 0, 1)
