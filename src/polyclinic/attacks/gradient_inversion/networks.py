"""LeNet and ResNet-18 of the gradient-inversion papers, and how any network is prepared for an attack.

Both follow from the numbers the papers give: three 5x5 convolutions of 12 channels and 100 classes make 85,036
parameters at 32 px in colour; a ResNet-18 without any stride, pooled by 4 before its 100 classes, makes 14.45 million
(with the usual strides it would be 11.2). Sigmoids instead of ReLU, so that second derivatives do not vanish.
"""

import copy
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from polyclinic.attacks.solvers.layers import BatchStatistics2d, ManyTargetsConv2d
from polyclinic.errors import BadInput

SPREAD = 0.5  # the papers draw LeNet's weights from U(-0.5, 0.5)


class LeNet(nn.Module):
    """Images [B, channels, size, size] to logits [B, classes]; sides are halved twice by strides, never by pooling."""

    def __init__(self, channels: int = 3, classes: int = 100, size: int = 32) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 12, 5, stride=2, padding=2)
        self.conv2 = nn.Conv2d(12, 12, 5, stride=2, padding=2)
        self.conv3 = nn.Conv2d(12, 12, 5, stride=1, padding=2)
        self.activation = nn.Sigmoid()
        side = -(-size // 4)
        self.fc = nn.Linear(12 * side * side, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.activation(self.conv1(images))
        x = self.activation(self.conv2(x))
        x = self.activation(self.conv3(x))
        return self.fc(x.flatten(1))


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the number of channels changes."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.activation = nn.Sigmoid()
        self.shortcut = nn.Sequential()
        if channels != width:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.activation(self.bn1(self.conv1(x)))
        return self.activation(self.bn2(self.conv2(h)) + self.shortcut(x))


class UnstridedResNet18(nn.Module):
    """Images [B, channels, size, size], size a multiple of 4, to logits [B, classes]; no strides at all."""

    def __init__(
        self, channels: int = 3, classes: int = 100, size: int = 32, widths: tuple[int, ...] = (64, 128, 256, 512)
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.activation = nn.Sigmoid()
        before = (widths[0], *widths[:-1])
        pairs = [(Block(a, b), Block(b, b)) for a, b in zip(before, widths, strict=True)]
        self.blocks = nn.Sequential(*(block for pair in pairs for block in pair))
        self.pool = nn.AvgPool2d(4)
        self.fc = nn.Linear(widths[-1] * (size // 4) ** 2, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.activation(self.bn1(self.conv1(images))))
        return self.fc(self.pool(x).flatten(1))


def with_random_weights(
    model: nn.Module, rng: torch.Generator, spread: float = SPREAD, *, batch_norm: bool = False
) -> nn.Module:
    """The same network, its convolutions and linear layers (and `batch_norm`) drawn anew from U(-spread, spread)."""
    drawn = (nn.Conv2d, nn.Linear, *((_BatchNorm,) if batch_norm else ()))
    for layer in model.modules():
        if isinstance(layer, drawn):
            for parameter in layer.parameters(recurse=False):
                nn.init.uniform_(parameter, -spread, spread, generator=rng)
    return model


def lenet_of_the_papers(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """LeNet with weights from U(-0.5, 0.5), drawn from torch's global state: as `model.backbone` of a study."""
    return with_random_weights(LeNet(in_channels, num_classes, image_size), torch.default_generator)


def resnet18_of_the_papers(
    in_channels: int, num_classes: int, image_size: int, widths: tuple[int, ...] = (64, 128, 256, 512)
) -> nn.Module:
    """ResNet-18 with weights from U(-0.5, 0.5), batch norm's too, drawn from torch's global state: as above."""
    network = UnstridedResNet18(in_channels, num_classes, image_size, tuple(widths))
    return with_random_weights(network, torch.default_generator, batch_norm=True)


def prepare_for_attack(
    model: nn.Module, *, batch_norm: Literal["train", "eval"] = "train", device: str | torch.device = "cpu"
) -> nn.Module:
    """A copy on `device` that computes as the site did and can be differentiated twice for many targets at once.

    `batch_norm` says what the site normalised by: its own batch ("train"), or running statistics ("eval"), which are
    then those in the buffers of `model`.
    """
    device = torch.device(device)
    twin = copy.deepcopy(model).to(device).requires_grad_(False).eval()
    for layer in twin.modules():
        if isinstance(layer, _BatchNorm) and batch_norm == "train":
            if not isinstance(layer, nn.BatchNorm2d):
                raise BadInput(f"attack.batch_norm: {type(layer).__name__} in training mode is unknown; use 2D layers")
            layer.__class__ = BatchStatistics2d  # keeps the parameters under their names
        elif device.type == "cuda" and ManyTargetsConv2d.can_replace(layer):
            layer.__class__ = ManyTargetsConv2d
    return twin
