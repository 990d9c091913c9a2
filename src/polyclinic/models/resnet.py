"""ResNet-18, 34, 50, 101 and 152 (He et al. 2016) under the usual state-dict names, so published 2D weights load.

Ours, because the public ones add and rectify in place, which per-sample gradients (Opacus) cannot follow, and
because some of them leave batch norm in the blocks when asked for group norm.
"""

from typing import ClassVar

from torch import Tensor, nn

from polyclinic.models.backbone import Backbone, norm_layer


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the shape changes."""

    #: channels that come out, as a multiple of `width`
    expansion: ClassVar[int] = 1

    def __init__(self, channels: int, width: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False), norm_layer(norm, width)
        self.relu1 = nn.ReLU()
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), norm_layer(norm, width)
        self.downsample = shortcut(channels, width, stride, norm)
        self.relu2 = nn.ReLU()  # a second module: per-sample gradients need one call per module

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu1(self.bn1(self.conv1(x)))
        h = self.bn2(self.conv2(h))
        return self.relu2(h + self.downsample(x))


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a 1x1 convolution, which gives four times the width, and a shortcut.

    The 3x3 convolution has the stride, as in the weights that PyTorch publishes; in the paper the first one has it.
    """

    expansion: ClassVar[int] = 4

    def __init__(self, channels: int, width: int, stride: int, norm: str) -> None:
        super().__init__()
        outputs = self.expansion * width
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), norm_layer(norm, width)
        self.relu1 = nn.ReLU()
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False), norm_layer(norm, width)
        self.relu2 = nn.ReLU()
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), norm_layer(norm, outputs)
        self.downsample = shortcut(channels, outputs, stride, norm)
        self.relu3 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu1(self.bn1(self.conv1(x)))
        h = self.relu2(self.bn2(self.conv2(h)))
        return self.relu3(self.bn3(self.conv3(h)) + self.downsample(x))


def shortcut(channels: int, outputs: int, stride: int, norm: str) -> nn.Sequential:
    """The summand of a block's output: its input, through a 1x1 convolution where the shape changes."""
    if stride == 1 and channels == outputs:
        return nn.Sequential()
    return nn.Sequential(nn.Conv2d(channels, outputs, 1, stride, bias=False), norm_layer(norm, outputs))


def layer(
    kind: type[Block] | type[Bottleneck], channels: int, width: int, blocks: int, stride: int, norm: str
) -> nn.Sequential:
    first = kind(channels, width, stride, norm)
    return nn.Sequential(first, *(kind(kind.expansion * width, width, 1, norm) for _ in range(blocks - 1)))


class ResNet18(Backbone):
    """Cut `conv1` lies after the stem: convolution, norm, ReLU and max pooling; `relu` before the max pooling.

    Below 33 px the last layer is a single pixel: batch norm then cannot train on a batch of one image.
    """

    name: ClassVar[str] = "resnet18"
    summary: ClassVar[str] = "ResNet-18, 11 million parameters: the backbone of the replay papers"
    block: ClassVar[type[Block] | type[Bottleneck]] = Block
    blocks: ClassVar[tuple[int, int, int, int]] = (2, 2, 2, 2)
    norm_layers: ClassVar[bool | None] = True
    stages: ClassVar[dict[str, tuple[str, ...]]] = {
        "relu": ("conv1", "bn1", "relu"), "conv1": ("maxpool",), "layer1": ("layer1",), "layer2": ("layer2",),
        "layer3": ("layer3",), "layer4": ("layer4",), "head": ("avgpool", "flatten", "fc"),
    }  # fmt: skip

    def __init__(self, channels: int, outputs: int, size: int, norm: str) -> None:
        super().__init__(channels, outputs, size, norm)
        self.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = norm_layer(norm, 64)
        self.relu, self.maxpool = nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)
        wide = self.block.expansion
        self.layer1 = layer(self.block, 64, 64, self.blocks[0], 1, norm)
        self.layer2 = layer(self.block, 64 * wide, 128, self.blocks[1], 2, norm)
        self.layer3 = layer(self.block, 128 * wide, 256, self.blocks[2], 2, norm)
        self.layer4 = layer(self.block, 256 * wide, 512, self.blocks[3], 2, norm)
        self.avgpool, self.flatten = nn.AdaptiveAvgPool2d(1), nn.Flatten()
        self.fc = nn.Linear(512 * wide, outputs)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    @classmethod
    def default_cut(cls) -> str:
        return "conv1"


class ResNet34(ResNet18):
    """ResNet-18 with more blocks per layer."""

    name: ClassVar[str] = "resnet34"
    summary: ClassVar[str] = "ResNet-34, 21 million parameters: deeper, for larger images"
    blocks: ClassVar[tuple[int, int, int, int]] = (3, 4, 6, 3)


class ResNet50(ResNet34):
    """ResNet-34 with bottleneck blocks."""

    name: ClassVar[str] = "resnet50"
    summary: ClassVar[str] = "ResNet-50, 24 million parameters: bottleneck blocks"
    block: ClassVar[type[Block] | type[Bottleneck]] = Bottleneck


class ResNet101(ResNet50):
    """ResNet-50 with more blocks in its third layer."""

    name: ClassVar[str] = "resnet101"
    summary: ClassVar[str] = "ResNet-101, 43 million parameters: deeper"
    blocks: ClassVar[tuple[int, int, int, int]] = (3, 4, 23, 3)


class ResNet152(ResNet50):
    """ResNet-101 with more blocks in its second and third layer."""

    name: ClassVar[str] = "resnet152"
    summary: ClassVar[str] = "ResNet-152, 58 million parameters: the largest of FedER's Table 7"
    blocks: ClassVar[tuple[int, int, int, int]] = (3, 8, 36, 3)
