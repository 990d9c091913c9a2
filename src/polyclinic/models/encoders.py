"""Encoders: networks with public weights that nobody trains, and the backbone that is one of them with a linear head.

A further encoder is a class and a line of `ENCODERS`, or a plug-in. Features are computed once and kept in a file
beside the images, whose name is a digest of the encoder's weights, the side of its images, the machine's arithmetic
and the images themselves; a file of other images or other weights is never taken for it. An encoder's weights are the
same everywhere, so they are no part of a model's weights: only the head is trained, sent and saved.
"""

import functools
import hashlib
import os
import weakref
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.files import atomic_file, digest_of, lock
from polyclinic.metrics.networks.efficientnet import LEVEL_CHANNELS, SHA256, VECTOR_WIDTH, efficientnet_lite0
from polyclinic.models.backbone import Backbone
from polyclinic.progress import tell
from polyclinic.registry import Registry

#: images that go through the network at once; the last batch is filled up with black images, so that the features of an
#: image do not depend on how many others there are (libraries compute batches of different sizes in different ways)
BATCH = 32


class Encoder(ABC):
    """One subclass per encoder. Nobody trains it, so its weights are the same for all."""

    width: ClassVar[int]  #: D, the length of a feature vector
    side: ClassVar[int | None] = None  #: the side to which images are resized; None leaves them as they are
    batch: ClassVar[int] = BATCH  #: images at once; fewer for a slow encoder, as a site with one image computes so many

    def __init__(self, device: str | torch.device = "cpu", side: int | None = None) -> None:
        """`side` is another side of the images than the encoder's own."""
        self.device = torch.device(device)
        self.image_side = side or self.side

    @property
    def identity(self) -> str | None:
        """A name of the weights, such as their SHA-256. Features are kept on disk only where there is one."""
        return None

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Features float32 [N, D] on the CPU of images uint8 [N, C, H, W] with one or three channels."""
        found = [self._of_batch(batch) for batch in images.split(self.batch)] if len(images) else []
        return torch.cat(found) if found else torch.zeros(0, self.width)

    def _of_batch(self, images: Tensor) -> Tensor:
        count = len(images)
        full = F.pad(images, (0, 0, 0, 0, 0, 0, 0, self.batch - count)).to(self.device).float().div(255)
        return self.of_unit(full)[:count].cpu()

    @torch.no_grad()
    def of_unit(self, images: Tensor) -> Tensor:
        """Features float32 [B, D] of images float [B, 1 or 3, H, W] in [0, 1] on the device."""
        colour, side = images.float().expand(-1, 3, -1, -1), self.image_side
        with torch.autocast(images.device.type, enabled=False):
            if side is not None and images.shape[-2:] != (side, side):
                colour = F.interpolate(colour, (side, side), mode="bilinear", antialias=True)
            return self.encode(colour).float()

    @abstractmethod
    def encode(self, images: Tensor) -> Tensor:
        """Features [B, D] of images float [B, 3, H, W] in [0, 1] on the device."""


# --- EfficientNet-Lite0 ---------------------------------------------------------------------------------------


SIDE = 224  #: the side of the images that the network was trained on
GRID = 4  #: cells a side, over which the last two levels are pooled


class EfficientNetLite0Encoder(Encoder):
    """EfficientNet-Lite0 (Google, 2020) with ImageNet weights: 1,280 features, images enlarged to 224 px."""

    width: ClassVar[int] = VECTOR_WIDTH
    side: ClassVar[int | None] = SIDE

    def __init__(self, device: str | torch.device = "cpu", side: int | None = None) -> None:
        super().__init__(device, side)
        self.network = efficientnet_lite0(self.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @property
    def identity(self) -> str:
        return SHA256

    def encode(self, images: Tensor) -> Tensor:
        return self.network.vector(images)


class EfficientNetLite0Levels(EfficientNetLite0Encoder):
    """All levels of EfficientNet-Lite0: mean and deviation of five, a 4 x 4 grid of the last two; 7,936 features."""

    width: ClassVar[int] = 2 * sum(LEVEL_CHANNELS) + GRID * GRID * sum(LEVEL_CHANNELS[-2:])

    def encode(self, images: Tensor) -> Tensor:
        levels = self.network.levels(images)
        means = [level.mean((2, 3)) for level in levels]
        deviations, grids = [_deviation(level) for level in levels], [_grid(level, GRID) for level in levels[-2:]]
        return torch.cat([*means, *deviations, *grids], 1)


class EfficientNetLite0Pooled2048(EfficientNetLite0Encoder):
    """Middle levels of EfficientNet-Lite0: a 4 x 4 grid after block 8, means and deviations of all; 2,048 features."""

    width: ClassVar[int] = 2048

    def encode(self, images: Tensor) -> Tensor:
        fine, *others, middle, deep, last = self.network.maps(images, (0, 2, 4, 7, 10, 15))
        means = [fine, *others, deep, last]
        deviations = [*others, middle, deep]
        return torch.cat([_grid(middle, 4), *(x.mean((2, 3)) for x in means), *(_deviation(x) for x in deviations)], 1)


class EfficientNetLite0Pooled1024(EfficientNetLite0Encoder):
    """Middle levels of EfficientNet-Lite0: a 3 x 3 grid after block 8, mean and deviation after 11; 1,024 features."""

    width: ClassVar[int] = 1024

    def encode(self, images: Tensor) -> Tensor:
        middle, deep = self.network.maps(images, (7, 10))
        return torch.cat([_grid(middle, 3), _deviation(middle), deep.mean((2, 3)), _deviation(deep)], 1)


def _grid(level: Tensor, cells: int) -> Tensor:
    return F.adaptive_avg_pool2d(level, cells).flatten(1)


def _deviation(level: Tensor) -> Tensor:
    return level.std((2, 3), correction=0)


ENCODERS: Registry[type[Encoder]] = Registry(
    "polyclinic.encoders",
    {
        "efficientnet-lite0-1280": EfficientNetLite0Encoder, "efficientnet-lite0-1024": EfficientNetLite0Pooled1024,
        "efficientnet-lite0-2048": EfficientNetLite0Pooled2048, "efficientnet-lite0-levels": EfficientNetLite0Levels,
    },
    base=Encoder,
)  # fmt: skip


# --- features kept in files -----------------------------------------------------------------------------------


PIECE = 1024  # images that lie in memory at once


def kept_features(encoder: Encoder, images: np.ndarray, folder: Path | None = None) -> np.ndarray:
    """Features float32 [N, D] of images uint8 [N, C, H, W]: out of the file, if there is one, else computed and kept.

    Images that are not memory-mapped from a folder need `folder`, or they have no file. Features of encoders without
    `identity` have none.
    """
    if id(images) in _REMEMBERED:
        return _REMEMBERED[id(images)]
    file, shape = features_file(encoder, images, folder), (len(images), encoder.width)
    if file is None:
        return _computed(encoder, images)
    kept = _read(file, shape)
    if kept is None:
        with lock(file.with_suffix(".lock")):  # of two runs that want the same features, the second waits for the first
            kept = _read(file, shape)
            if kept is None:
                kept = _computed(encoder, images)
                with atomic_file(file) as scratch, scratch.open("wb") as stream:
                    np.save(stream, kept, allow_pickle=False)
    return kept


#: features of arrays in memory, by `id`
_REMEMBERED: dict[int, np.ndarray] = {}


def remember_features(images: np.ndarray, features: np.ndarray) -> None:
    """Have `kept_features` give these for this very array, for as long as the array is there."""
    _REMEMBERED[id(images)] = features
    weakref.finalize(images, _REMEMBERED.pop, id(images), None)


def _read(file: Path, shape: tuple[int, int]) -> np.ndarray | None:
    """The features in a file; None where there is none, or it is damaged."""
    try:
        found = np.load(file, mmap_mode="r", allow_pickle=False)
    except Exception:  # numpy reads a header as Python does: a damaged one fails in many ways
        return None
    return found if getattr(found, "shape", None) == shape and found.dtype == np.float32 else None


def features_file(encoder: Encoder, images: np.ndarray, folder: Path | None = None) -> Path | None:
    """The file of these images' features: in `folder`, or beside them; None where they cannot be."""
    name = getattr(images, "filename", None)
    folder = Path(name).parent if folder is None and name is not None else folder
    if encoder.identity is None or folder is None or not os.access(folder, os.W_OK):
        return None
    key = {
        "encoder": type(encoder).__qualname__, "weights": encoder.identity, "side": encoder.image_side,
        "device": encoder.device.type, "torch": torch.__version__, "images": _digest(images),
    }  # fmt: skip
    if encoder.batch != BATCH:  # other sizes compute other last bits
        key["batch"] = encoder.batch
    return folder / f"features-{digest_of(key)[:24]}.npy"


def _computed(encoder: Encoder, images: np.ndarray) -> np.ndarray:
    pieces = [images[start : start + PIECE] for start in range(0, len(images), PIECE)]
    found = []
    for piece in pieces:
        found.append(encoder.features(torch.from_numpy(np.array(piece))).numpy())
        tell("encoding images", sum(map(len, found)), len(images))
    return np.concatenate(found) if found else np.zeros((0, encoder.width), np.float32)


def _digest(images: np.ndarray) -> str:
    total = hashlib.sha256(f"{images.dtype} {images.shape}".encode())
    for start in range(0, len(images), PIECE):
        total.update(np.ascontiguousarray(images[start : start + PIECE]).data)
    return total.hexdigest()


# --- encoded ------------------------------------------------------------------------------------------------


class EncoderFeatures(nn.Module):
    """Features [B, D] of images [B, C, H, W] in [0, 1]."""

    def __init__(self, encoder: type[Encoder]) -> None:
        super().__init__()
        self.encoder_class = encoder
        self.side: int | None = None

    def encoder(self, device: torch.device) -> Encoder:
        return _encoder(self.encoder_class, device, self.side)

    def forward(self, images: Tensor) -> Tensor:
        if images.device.type == "meta":
            return images.new_zeros(len(images), self.encoder_class.width)
        return self.encoder(images.device).of_unit(images)


class QuadraticHead(nn.Module):
    """Outputs [B, T] that are quadratic in the features [B, D]: what Gaussians of different spread for each class need.

    `diagonal`: squares of single features only, and no products of two.
    """

    def __init__(self, features: int, outputs: int, *, diagonal: bool) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(features))
        self.weight = nn.Parameter(torch.zeros(outputs, features))
        self.bias = nn.Parameter(torch.zeros(outputs))
        shape = (outputs, features) if diagonal else (outputs, features, features)
        self.products = nn.Parameter(torch.zeros(shape))

    def forward(self, features: Tensor) -> Tensor:
        x = features - self.get_buffer("center")
        linear = x @ self.weight.T + self.bias
        if self.products.dim() == 2:
            return linear + x.square() @ self.products.T
        return linear + torch.stack([((x @ one) * x).sum(1) for one in self.products], 1)


class Encoded(Backbone):
    """Cut `features` lies between the encoder and the head."""

    encoder_class: ClassVar[type[Encoder]]
    norm_layers: ClassVar[bool | None] = False
    stages: ClassVar[dict[str, tuple[str, ...]]] = {"features": ("features",), "head": ("fc",)}

    def __init__(self, channels: int, outputs: int, size: int, norm: str) -> None:
        super().__init__(channels, outputs, size, norm)
        self.features = EncoderFeatures(self.encoder_class)
        self.frozen = ("features",)
        self.fc: nn.Module = nn.Linear(self.encoder_class.width, outputs)

    @property
    def outputs(self) -> int:
        return len(self.fc.get_parameter("bias"))

    def use_head(self, head: str) -> None:
        """Have another head than a linear one: `diagonal` or `quadratic`."""
        if head != "linear":
            self.fc = QuadraticHead(self.encoder_class.width, self.outputs, diagonal=head == "diagonal")

    def run_stage(self, stage: str, x: Tensor) -> Tensor:
        """The head computes in float32 whatever the study does: a head in closed form subtracts large numbers, of
        which bfloat16 would leave nothing."""
        if stage != "head" or x.device.type == "meta":
            return super().run_stage(stage, x)
        with torch.autocast(x.device.type, enabled=False):
            return super().run_stage(stage, x.float())

    def resize_to(self, side: int, size: int) -> None:
        """The encoder itself resizes images."""
        self.features.side = side


def encoded(name: str) -> type[Encoded]:
    """The backbone that is an encoder of the registry with a linear head; the same class every time."""
    return _encoded(name, ENCODERS[name])


@functools.lru_cache(maxsize=32)
def _encoded(name: str, encoder: type[Encoder]) -> type[Encoded]:
    first_line = (encoder.__doc__ or "").strip().splitlines() or [f"{encoder.width} features"]
    facts = {"name": name, "summary": f"a linear head on an encoder: {first_line[0]}", "encoder_class": encoder}
    facts["__module__"] = __name__  # and not that of whoever makes the class
    return type(f"{encoder.__name__}Head", (Encoded,), facts)


@functools.lru_cache(maxsize=4)
def _encoder(encoder: type[Encoder], device: torch.device, side: int | None) -> Encoder:
    """One encoder of a process for all networks that use it."""
    return encoder(device) if side is None else encoder(device, side)
