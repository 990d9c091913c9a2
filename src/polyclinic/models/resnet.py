"""ResNet-18 and ResNet-34 (He et al. 2016) under the usual state-dict names, so published 2D weights load.

Ours, because the public ones add and rectify in place, which per-sample gradients (Opacus) cannot follow, and
because some of them leave batch norm in the blocks when asked for group norm.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from polyclinic.models.backbone import Backbone
from polyclinic.models.norms import norm_layer


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, channels: int, width: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = norm_layer(norm, width)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = norm_layer(norm, width)
        self.downsample = nn.Sequential()
        if stride != 1 or channels != width:
            project = nn.Conv2d(channels, width, 1, stride, bias=False)
            self.downsample = nn.Sequential(project, norm_layer(norm, width))
        self.relu2 = nn.ReLU()  # a second module: per-sample gradients need one call per module

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu1(self.bn1(self.conv1(x)))
        h = self.bn2(self.conv2(h))
        return self.relu2(h + self.downsample(x))


def layer(channels: int, width: int, blocks: int, stride: int, norm: str) -> nn.Sequential:
    first = Block(channels, width, stride, norm)
    return nn.Sequential(first, *(Block(width, width, 1, norm) for _ in range(blocks - 1)))


class ResNet18(Backbone):
    """Cut `conv1` lies after the stem: convolution, norm, ReLU and max pooling.

    Below 33 px the last layer is a single pixel: batch norm then cannot train on a batch of one image.
    """

    name: ClassVar[str] = "resnet18"
    summary: ClassVar[str] = "ResNet-18, 11 million parameters: the backbone of the replay papers"
    blocks: ClassVar[tuple[int, int, int, int]] = (2, 2, 2, 2)
    stages: ClassVar[dict[str, tuple[str, ...]]] = {
        "conv1": ("conv1", "bn1", "relu", "maxpool"),
        "layer1": ("layer1",),
        "layer2": ("layer2",),
        "layer3": ("layer3",),
        "layer4": ("layer4",),
        "head": ("avgpool", "flatten", "fc"),
    }

    def __init__(self, channels: int, outputs: int, size: int, norm: str) -> None:
        super().__init__(channels, outputs, size, norm)
        self.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = norm_layer(norm, 64)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = layer(64, 64, self.blocks[0], 1, norm)
        self.layer2 = layer(64, 128, self.blocks[1], 2, norm)
        self.layer3 = layer(128, 256, self.blocks[2], 2, norm)
        self.layer4 = layer(256, 512, self.blocks[3], 2, norm)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(512, outputs)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class ResNet34(ResNet18):
    """ResNet-18 with more blocks per layer."""

    name: ClassVar[str] = "resnet34"
    summary: ClassVar[str] = "ResNet-34, 21 million parameters: deeper, for larger images"
    blocks: ClassVar[tuple[int, int, int, int]] = (3, 4, 6, 3)
