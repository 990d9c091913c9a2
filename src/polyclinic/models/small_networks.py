"""Small networks without public weights: small-cnn, LeNet-5, and the two classifiers of FELICIA.

FELICIA's (Rajotte et al. 2021, footnotes 1 and 4) are named by their layers. The paper gives filters and units only.
Kernels and pooling of the first are those of the classifier in PrivGAN's public code, which has the same layers
(without its dropout: a network here draws no random numbers). Kernels and strides of the second are those of our
GANs. A class has an output of its own, where the paper has one output and a sigmoid for two classes: the same family of
functions.
"""

from typing import ClassVar

from torch import nn

from polyclinic.models.backbone import Backbone, norm_layer


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
        self.conv1, self.norm1 = nn.Conv2d(channels, 32, 3, padding=1, bias=False), norm_layer(norm, 32)
        self.relu1, self.pool1 = nn.ReLU(), nn.MaxPool2d(2)
        self.conv2, self.norm2 = nn.Conv2d(32, 64, 3, padding=1, bias=False), norm_layer(norm, 64)
        self.relu2, self.pool2 = nn.ReLU(), nn.MaxPool2d(2)
        self.conv3, self.norm3 = nn.Conv2d(64, 64, 3, padding=1, bias=False), norm_layer(norm, 64)
        self.relu3, self.avgpool, self.flatten = nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        self.fc = nn.Linear(64, outputs)


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
        self.conv1, self.tanh1, self.pool1 = nn.Conv2d(channels, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2)
        self.conv2, self.tanh2, self.pool2 = nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2)
        self.flatten = nn.Flatten()
        self.fc1, self.tanh3 = nn.Linear(16 * ((size // 2 - 4) // 2) ** 2, 120), nn.Tanh()
        self.fc2, self.tanh4 = nn.Linear(120, 84), nn.Tanh()
        self.fc3 = nn.Linear(84, outputs)


class CNN32x64x128(Backbone):
    """Convolutions of 3x3 pixels with 32 and 64 filters, max pooling, a dense layer of 128 units, the head."""

    name: ClassVar[str] = "cnn-32-64-128"
    summary: ClassVar[str] = "two convolutions and a dense layer: FELICIA's classifier of digits"
    norm_layers: ClassVar[bool | None] = False
    stages: ClassVar[dict[str, tuple[str, ...]]] = {
        "conv1": ("conv1", "relu1"), "conv2": ("conv2", "relu2", "pool"), "head": ("flatten", "fc1", "relu3", "fc2"),
    }  # fmt: skip

    def __init__(self, channels: int, outputs: int, size: int, norm: str) -> None:
        super().__init__(channels, outputs, size, norm)
        self.conv1, self.relu1 = nn.Conv2d(channels, 32, 3), nn.ReLU()
        self.conv2, self.relu2, self.pool = nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)
        self.flatten = nn.Flatten()
        self.fc1, self.relu3 = nn.Linear(64 * ((size - 4) // 2) ** 2, 128), nn.ReLU()
        self.fc2 = nn.Linear(128, outputs)


class CNN64x128x64x32(Backbone):
    """Convolutions of 4x4 pixels and stride 2 with 64, 128 and 64 filters, a dense layer of 32 units, the head."""

    name: ClassVar[str] = "cnn-64-128-64-32"
    summary: ClassVar[str] = "three convolutions and a dense layer: FELICIA's classifier of skin lesions"
    norm_layers: ClassVar[bool | None] = False
    stages: ClassVar[dict[str, tuple[str, ...]]] = {
        "conv1": ("conv1", "relu1"), "conv2": ("conv2", "relu2"), "conv3": ("conv3", "relu3"),
        "head": ("flatten", "fc1", "relu4", "fc2"),
    }  # fmt: skip

    def __init__(self, channels: int, outputs: int, size: int, norm: str) -> None:
        super().__init__(channels, outputs, size, norm)
        self.conv1, self.relu1 = nn.Conv2d(channels, 64, 4, 2, 1), nn.ReLU()
        self.conv2, self.relu2 = nn.Conv2d(64, 128, 4, 2, 1), nn.ReLU()
        self.conv3, self.relu3 = nn.Conv2d(128, 64, 4, 2, 1), nn.ReLU()
        self.flatten = nn.Flatten()
        self.fc1, self.relu4 = nn.Linear(64 * (size // 8) ** 2, 32), nn.ReLU()
        self.fc2 = nn.Linear(32, outputs)
