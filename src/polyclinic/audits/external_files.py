"""Files of others that an audit reads: weights before and after a site trained, and folders of images."""

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from pydantic import Field, ValidationError
from torch import Tensor, nn

from polyclinic.data.archives import UNREADABLE, unpacked_size
from polyclinic.data.reading import Reader, is_image_name
from polyclinic.errors import BadInput
from polyclinic.models import build
from polyclinic.models.weights_file import read_weights
from polyclinic.settings import Settings

#: of all arrays of an archive of weights
MOST_BYTES = 2**32


class UpdateSettings(Settings):
    """How the site trained; `--settings lr=0.1,steps=1,batch=8,optimizer=sgd`."""

    lr: float = Field(gt=0, description="learning rate of the site")
    steps: int = Field(1, ge=1, description="optimiser steps between the two files")
    batch: int = Field(1, ge=1, description="images in a step")
    optimizer: Literal["sgd", "adam", "adamw"] = Field("sgd", description="the site's optimiser")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of sgd")
    weight_decay: float = Field(0.0, ge=0, description="weight decay of sgd")
    size: int | None = Field(None, ge=8, le=4096, description="side of images for the network; that of the files")
    channels: int | None = Field(None, ge=1, le=3, description="1 or 3; that of the files if not given")
    outputs: int | None = Field(None, ge=1, description="outputs of the network; those of its last layer")
    batch_norm: Literal["train", "eval"] = Field("train", description="batch norm while the site trained")

    @property
    def images(self) -> int:
        return self.steps * self.batch


@dataclass(frozen=True)
class Sent:
    """A file that a site sent: weights (`--after`), or their difference to the weights before (`--change`)."""

    path: Path
    flag: Literal["--after", "--change"] = "--after"

    def weights(self, network: nn.Module, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights after the site trained."""
        found = fit_names(read_tensors(self.path, self.flag), network, self.path, self.flag)
        if self.flag == "--after":
            return found
        return {name: before[name] + tensor for name, tensor in found.items() if name in before}


@dataclass(frozen=True)
class Update:
    """What an attacker has of an update: the network before it, both states, and how the site trained."""

    network: nn.Module
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    settings: UpdateSettings
    shape: tuple[int, int, int]
    outputs: int


def parse_settings(text: str) -> UpdateSettings:
    """Settings written as name=value with commas between them; BadInput names the one that is wrong."""
    pairs: dict[str, Any] = {}
    for part in (one.strip() for one in text.split(",") if one.strip()):
        name, equals, value = part.partition("=")
        if not equals:
            raise BadInput(f"--settings: '{part}' is no name=value; write for example lr=0.1,steps=1,batch=8")
        pairs[name.strip()] = value.strip()
    try:
        return UpdateSettings.model_validate(pairs, strict=False)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or "settings"
        known = ", ".join(UpdateSettings.model_fields)
        raise BadInput(f"--settings: {name}: {first['msg']}; the settings are {known}") from None


def read_tensors(path: Path, flag: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file, of an npz archive (Flower's lists of arrays too) or of a torch file.

    No pickled object is ever built.
    """
    if not path.is_file():
        raise BadInput(f"{flag}: there is no file '{path}'; name the weights that were saved")
    if path.suffix == ".npz":
        return _read_npz(path, flag)
    try:
        return dict(read_weights(path).tensors)
    except BadInput as error:
        raise BadInput(f"{flag}: {str(error).removeprefix('model.weights: ')}") from None


def _read_npz(path: Path, flag: str) -> dict[str, Tensor]:
    try:
        with zipfile.ZipFile(path) as packed:  # zeros pack to a thousandth
            if unpacked_size(packed) > MOST_BYTES:
                raise ValueError(f"it unpacks to more than {MOST_BYTES >> 30} GiB")
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as archive:
            return {name: torch.from_numpy(np.ascontiguousarray(archive[name])) for name in archive.files}
    except UNREADABLE as error:
        raise BadInput(f"{flag}: '{path}' is no archive of plain arrays ({error}); save it with numpy.savez") from None


def fit_names(tensors: Mapping[str, Tensor], network: nn.Module, path: Path, flag: str) -> dict[str, Tensor]:
    """The tensors under the network's own names: by name, or in its order where a file only numbers them (Flower)."""
    wanted = network.state_dict()
    if set(tensors) & set(wanted):
        found = {name: tensor for name, tensor in tensors.items() if name in wanted}
    elif len(tensors) in (len(wanted), len(list(network.parameters()))):
        names = list(wanted) if len(tensors) == len(wanted) else [name for name, _ in network.named_parameters()]
        found = dict(zip(names, tensors.values(), strict=True))
    else:
        raise BadInput(
            f"{flag}: '{path}' has {len(tensors)} tensors under other names than the network's {len(wanted)}; name the "
            "network that was trained with --model"
        )
    for name, tensor in found.items():
        if tensor.shape != wanted[name].shape:
            raise BadInput(
                f"{flag}: '{name}' in '{path}' has the shape {tuple(tensor.shape)}, and the network's is "
                f"{tuple(wanted[name].shape)}; name the network that was trained with --model"
            )
        if not tensor.isfinite().all():
            raise BadInput(f"{flag}: '{name}' in '{path}' is not finite; name another file")
    missing = [name for name, _ in network.named_parameters() if name not in found]
    if missing:
        raise BadInput(f"{flag}: '{path}' lacks '{missing[0]}' and {len(missing) - 1} more of the network's parameters")
    return {name: tensor.to(wanted[name].dtype) for name, tensor in found.items()}


def build_network(
    model: str, settings: UpdateSettings, tensors: Mapping[str, Tensor], size: int, channels: int
) -> nn.Module:
    """A backbone of `polyclinic list backbones`, or any network as package.module:callable."""
    outputs = settings.outputs or _outputs(tensors)
    try:
        return build(model, channels=channels, outputs=outputs, size=size)
    except BadInput as error:  # the user wrote no study
        raise BadInput(str(error).replace("model.backbone", "--model")) from None


def _outputs(tensors: Mapping[str, Tensor]) -> int:
    """As many as the last vector has numbers: the bias of the last layer."""
    vectors = [tensor for tensor in tensors.values() if tensor.dim() == 1]
    if not vectors:
        raise BadInput("--settings: outputs: the file has no bias that tells how many there are; add outputs=NUMBER")
    return len(vectors[-1])


MOST = 5000  #: images of one folder


@dataclass(frozen=True)
class ImageFolder:
    """images uint8 [N, C, H, W]; labels int64 [N], or none where the folder has no folders for classes."""

    images: Tensor
    labels: Tensor | None
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.images)

    def with_classes(self, classes: tuple[str, ...]) -> "ImageFolder":
        """The same with labels that count in a longer list of classes."""
        if self.labels is None:
            return self
        places = torch.tensor([classes.index(name) for name in self.classes])
        return ImageFolder(self.images, places[self.labels], classes)

    def without(self, trained: "ImageFolder") -> "ImageFolder":
        """The same without images that were trained on, pixel for pixel: they were not held out."""
        inside = {image.numpy().tobytes() for image in trained.images}
        kept = torch.tensor([image.numpy().tobytes() not in inside for image in self.images], dtype=torch.bool)
        if not kept.any():
            raise BadInput("--held-out: all its images are among those trained on; name images of other patients")
        return ImageFolder(self.images[kept], None if self.labels is None else self.labels[kept], self.classes)


def share_classes(first: ImageFolder, second: ImageFolder, outputs: int) -> tuple[ImageFolder, ImageFolder]:
    """Both with the classes of either, in the order of their names: a site may have images of one class only."""
    classes = tuple(sorted({*first.classes, *second.classes}))
    if len(classes) > outputs:
        raise BadInput(
            f"--held-out: the folders of both sets name {len(classes)} classes ({', '.join(classes)}), and the network "
            f"has {outputs} outputs; give folders of one class the same name"
        )
    return first.with_classes(classes), second.with_classes(classes)


def read_folder(folder: Path, flag: str, *, size: int | None = None, channels: int | None = None) -> ImageFolder:
    """All images below a folder, in the order of their names. Without a size, that of the first image, as a square."""
    if not folder.is_dir():
        raise BadInput(f"{flag}: '{folder}' is no folder; name a folder with images")
    files = sorted(file for file in folder.rglob("*") if file.is_file() and is_image_name(file))
    if len(files) > MOST:
        raise BadInput(f"{flag}: '{folder}' holds {len(files)} images; at most {MOST} are compared: name a part of it")
    if not files:
        raise BadInput(f"{flag}: '{folder}' holds no images; name a folder with PNG, JPEG, DICOM or NIfTI files")
    pixels = [_read(file, flag) for file in files]
    channels = channels or (3 if pixels[0].ndim == 3 else 1)
    side = size or min(pixels[0].shape[:2])
    images = np.stack([_as_channels(one, side, channels) for one in pixels])
    names = [file.relative_to(folder).parts[0] if file.parent != folder else "" for file in files]
    found = tuple(sorted(set(names)))
    if "" in found:
        return ImageFolder(torch.from_numpy(images), None, ())
    labels = torch.tensor([found.index(name) for name in names])
    return ImageFolder(torch.from_numpy(images), labels, found)


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
