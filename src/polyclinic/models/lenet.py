"""LeNet-5 (LeCun et al. 1998): tanh and no norm layers, the usual network of gradient-inversion papers."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from polyclinic.models.backbone import Backbone


class LeNet5(Backbone):
    """Tanh and average pooling as in the original, so second derivatives exist. `norm` changes nothing."""

    name: ClassVar[str] = "lenet5"
    summary: ClassVar[str] = "LeNet-5, tanh and no norm layers: the usual target of gradient inversion"
    norm_layers: ClassVar[bool | None] = False
    stages: ClassVar[dict[str, tuple[str, ...]]] = {
        "conv1": ("conv1", "tanh1", "pool1"),
        "conv2": ("conv2", "tanh2", "pool2"),
        "head": ("flatten", "fc1", "tanh3", "fc2", "tanh4", "fc3"),
    }

    def __init__(self, channels: int, outputs: int, size: int, norm: str) -> None:
        super().__init__(channels, outputs, size, norm)
        self.conv1 = nn.Conv2d(channels, 6, 5, padding=2)
        self.tanh1 = nn.Tanh()
        self.pool1 = nn.AvgPool2d(2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.tanh2 = nn.Tanh()
        self.pool2 = nn.AvgPool2d(2)
        self.flatten = nn.Flatten()
        side = (size // 2 - 4) // 2
        self.fc1 = nn.Linear(16 * side * side, 120)
        self.tanh3 = nn.Tanh()
        self.fc2 = nn.Linear(120, 84)
        self.tanh4 = nn.Tanh()
        self.fc3 = nn.Linear(84, outputs)
