"""A small convolutional network that trains quickly on a CPU."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from polyclinic.models.backbone import Backbone
from polyclinic.models.norms import norm_layer


class SmallCNN(Backbone):
    """Three times convolution, norm and ReLU, halving the side twice, then the mean over the image."""

    name: ClassVar[str] = "small-cnn"
    summary: ClassVar[str] = "three convolutions, 57 thousand parameters: quick studies on a CPU"
    norm_layers: ClassVar[bool | None] = True
    stages: ClassVar[dict[str, tuple[str, ...]]] = {
        "conv1": ("conv1", "norm1", "relu1", "pool1"),
        "conv2": ("conv2", "norm2", "relu2", "pool2"),
        "head": ("conv3", "norm3", "relu3", "avgpool", "flatten", "fc"),
    }

    def __init__(self, channels: int, outputs: int, size: int, norm: str) -> None:
        super().__init__(channels, outputs, size, norm)
        self.conv1 = nn.Conv2d(channels, 32, 3, padding=1, bias=False)
        self.norm1 = norm_layer(norm, 32)
        self.relu1 = nn.ReLU()
        self.pool1 = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1, bias=False)
        self.norm2 = norm_layer(norm, 64)
        self.relu2 = nn.ReLU()
        self.pool2 = nn.MaxPool2d(2)
        self.conv3 = nn.Conv2d(64, 64, 3, padding=1, bias=False)
        self.norm3 = norm_layer(norm, 64)
        self.relu3 = nn.ReLU()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(64, outputs)
