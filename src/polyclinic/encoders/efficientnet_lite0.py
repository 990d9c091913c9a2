"""EfficientNet-Lite0 with ImageNet weights as an encoder: its last vector, or all its levels pooled."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from polyclinic.encoders.base import Encoder
from polyclinic.metrics.networks.efficientnet import LEVEL_CHANNELS, SHA256, VECTOR_WIDTH, efficientnet_lite0

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
        return pooled_levels(self.network.levels(images))


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


def pooled_levels(levels: list[Tensor]) -> Tensor:
    """Features [B, 7936] of five feature maps [B, C, H, W]."""
    means = [level.mean((2, 3)) for level in levels]
    deviations = [_deviation(level) for level in levels]
    grids = [_grid(level, GRID) for level in levels[-2:]]
    return torch.cat([*means, *deviations, *grids], 1)


def _grid(level: Tensor, cells: int) -> Tensor:
    return F.adaptive_avg_pool2d(level, cells).flatten(1)


def _deviation(level: Tensor) -> Tensor:
    return level.std((2, 3), correction=0)
