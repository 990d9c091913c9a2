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

    def with_classes(self, classes: tuple[str, ...]) -> OutsideImages:
        """The same with labels that count in a longer list of classes."""
        if self.labels is None:
            return self
        places = torch.tensor([classes.index(name) for name in self.classes])
        return OutsideImages(self.images, places[self.labels], classes)

    def without(self, trained: OutsideImages) -> OutsideImages:
        """The same without images that were trained on, pixel for pixel: they were not held out."""
        inside = {image.numpy().tobytes() for image in trained.images}
        kept = torch.tensor([image.numpy().tobytes() not in inside for image in self.images], dtype=torch.bool)
        if not kept.any():
            raise BadInput("--held-out: all its images are among those trained on; name images of other patients")
        return OutsideImages(self.images[kept], None if self.labels is None else self.labels[kept], self.classes)


def share_classes(first: OutsideImages, second: OutsideImages, outputs: int) -> tuple[OutsideImages, OutsideImages]:
    """Both with the classes of either, in the order of their names: a site may have images of one class only."""
    classes = tuple(sorted({*first.classes, *second.classes}))
    if len(classes) > outputs:
        raise BadInput(
            f"--held-out: the folders of both sets name {len(classes)} classes ({', '.join(classes)}), and the network "
            f"has {outputs} outputs; give folders of one class the same name"
        )
    return first.with_classes(classes), second.with_classes(classes)


def read_folder(folder: Path, flag: str, *, size: int | None = None, channels: int | None = None) -> OutsideImages:
    """All images below a folder, in the order of their names. Without a size, that of the first image, as a square."""
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
    labels = torch.tensor([found.index(name) for name in names])
    return OutsideImages(torch.from_numpy(images), labels, found)


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
