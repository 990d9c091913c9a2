"""EfficientNet-Lite0 with ImageNet weights as an encoder."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from polyclinic.encoders.base import Encoder
from polyclinic.metrics.networks.efficientnet import VECTOR_WIDTH, efficientnet_lite0

SIDE = 224  #: the side of the images that the network was trained on


class EfficientNetLite0Encoder(Encoder):
    """EfficientNet-Lite0 (Google, 2020) with ImageNet weights: 1,280 features, images enlarged to 224 px."""

    width: ClassVar[int] = VECTOR_WIDTH

    def __init__(self, device: str | torch.device = "cpu") -> None:
        super().__init__(device)
        self.network = efficientnet_lite0(self.device)

    def encode(self, images: Tensor) -> Tensor:
        return self.network.vector(F.interpolate(images, (SIDE, SIDE), mode="bilinear", antialias=True))
