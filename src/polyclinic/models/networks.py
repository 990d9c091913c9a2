"""Networks that are written here: ResNets, small classifiers, U-Nets for masks.

ResNet-18, 34, 50, 101 and 152 (He et al. 2016) have the usual state-dict names, so published 2D weights load. Ours,
because the public ones add and rectify in place, which per-sample gradients (Opacus) cannot follow, and because some of
them leave batch norm in the blocks when asked for group norm.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.extras import need
from polyclinic.models.backbone import GROUPS, Backbone, norm_layer, with_norm


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


# --- small networks without public weights --------------------------------------------------------
# The two classifiers of FELICIA (Rajotte et al. 2021, footnotes 1 and 4) are named by their layers; the paper gives
# filters and units only. Kernels and pooling of the first are those of the classifier in PrivGAN's public code, without
# its dropout: a network here draws no random numbers. Those of the second are our GANs'. A class has an output of its
# own, where the paper has one output and a sigmoid for two classes: the same family of functions.


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


# --- U-Nets for masks: MONAI's BasicUNet, and the one of Qu et al. 2022 (Section 4.3) ---------------
# Qu's has four levels, a bottleneck of 512 filters, batch norm and ReLU. The paper takes it pretrained on the brain MRI
# of Buda et al. 2019: layers have the state-dict names of the network that Buda published, so that its weights load
# (`model.weights`). Ours gives logits, as every backbone does.


FEATURES = (32, 32, 64, 128, 256, 32)
DOWN = ("down_1", "down_2", "down_3", "down_4")
UP = ("upcat_4", "upcat_3", "upcat_2", "upcat_1")


class UNet(Backbone):
    """Cut `block1` lies after the first two convolutions, whose output is all that the rest needs."""

    name: ClassVar[str] = "unet"
    summary: ClassVar[str] = "U-Net (MONAI's BasicUNet), 2 million parameters: segmentation"
    norm_layers: ClassVar[bool | None] = True
    stages: ClassVar[dict[str, tuple[str, ...]]] = {"block1": ("conv_0",), "rest": (*DOWN, *UP, "final_conv")}
    dense: ClassVar[bool] = True

    def __init__(self, channels: int, outputs: int, size: int, norm: str) -> None:
        # here, because importing MONAI takes longer than most commands
        need("monai", "model.backbone: 'unet'")
        from monai.networks.nets import BasicUNet

        super().__init__(channels, outputs, size, norm)
        basic = BasicUNet(
            spatial_dims=2,
            in_channels=channels,
            out_channels=outputs,
            features=FEATURES,
            act=("LeakyReLU", {"negative_slope": 0.1}),  # not in place: see above
            norm=("group", {"num_groups": GROUPS}) if norm == "group" else "batch",
        )
        for name, child in basic.named_children():
            self.add_module(name, with_norm(child, norm))

    def run_stage(self, stage: str, x: Tensor) -> Tensor:
        return super().run_stage(stage, x) if stage == "block1" else self._encode_and_decode(x)

    def _encode_and_decode(self, features: Tensor) -> Tensor:
        """[B, 32, H, W] to [B, outputs, H, W]."""
        height, width = features.shape[-2:]
        x = padded(features)
        skips = []
        for name in DOWN:
            skips.append(x)
            x = self.get_submodule(name)(x)
        for name in UP:
            up = self.get_submodule(name)
            # as the block's own `forward`, which torch cannot compile; sides are multiples of 16, so none is padded
            x = up.get_submodule("convs")(torch.cat([skips.pop(), up.get_submodule("upsample")(x)], dim=1))
        return self.get_submodule("final_conv")(x)[..., :height, :width]


def padded(features: Tensor) -> Tensor:
    """Feature maps [B, C, H, W] with zeros at the right and below, up to a multiple of 16: four levels halve them."""
    height, width = features.shape[-2:]
    return F.pad(features, (0, -width % 16, 0, -height % 16))


WIDTHS = (32, 64, 128, 256)  # of the four levels
BOTTLENECK = 512
LEVELS = (1, 2, 3, 4)


def block(channels: int, width: int, norm: str, name: str) -> nn.Sequential:
    """Two 3x3 convolutions, each with norm and ReLU."""
    layers = nn.Sequential()
    for number, inputs in ((1, channels), (2, width)):
        layers.add_module(f"{name}conv{number}", nn.Conv2d(inputs, width, 3, padding=1, bias=False))
        layers.add_module(f"{name}norm{number}", norm_layer(norm, width))
        layers.add_module(f"{name}relu{number}", nn.ReLU())
    return layers


class UNet512(Backbone):
    """Cut `block1` lies after the first encoding block, before its pooling: all that the rest needs."""

    name: ClassVar[str] = "unet-512"
    summary: ClassVar[str] = "U-Net, 7.8 million parameters, as in the replay paper: segmentation"
    norm_layers: ClassVar[bool | None] = True
    stages: ClassVar[dict[str, tuple[str, ...]]] = {
        "block1": ("encoder1",),
        "rest": (
            *("pool1", "encoder2", "pool2", "encoder3", "pool3", "encoder4", "pool4", "bottleneck"),
            *("upconv4", "decoder4", "upconv3", "decoder3", "upconv2", "decoder2", "upconv1", "decoder1", "conv"),
        ),
    }
    dense: ClassVar[bool] = True

    def __init__(self, channels: int, outputs: int, size: int, norm: str) -> None:
        super().__init__(channels, outputs, size, norm)
        for level, inputs, width in zip(LEVELS, (channels, *WIDTHS), WIDTHS, strict=False):
            self.add_module(f"encoder{level}", block(inputs, width, norm, f"enc{level}"))
            self.add_module(f"pool{level}", nn.MaxPool2d(2))
        self.bottleneck = block(WIDTHS[-1], BOTTLENECK, norm, "bottleneck")
        for level in reversed(LEVELS):
            width = WIDTHS[level - 1]
            self.add_module(f"upconv{level}", nn.ConvTranspose2d(2 * width, width, 2, stride=2))
            self.add_module(f"decoder{level}", block(2 * width, width, norm, f"dec{level}"))
        self.conv = nn.Conv2d(WIDTHS[0], outputs, 1)

    def run_stage(self, stage: str, x: Tensor) -> Tensor:
        return super().run_stage(stage, x) if stage == "block1" else self._encode_and_decode(x)

    def _encode_and_decode(self, features: Tensor) -> Tensor:
        """[B, 32, H, W] to [B, outputs, H, W]."""
        height, width = features.shape[-2:]
        skips = [padded(features)]
        for level in LEVELS[1:]:
            skips.append(self._run(f"encoder{level}", self._run(f"pool{level - 1}", skips[-1])))
        x = self._run("bottleneck", self._run("pool4", skips[-1]))
        for level in reversed(LEVELS):
            x = torch.cat([self._run(f"upconv{level}", x), skips.pop()], dim=1)
            x = self._run(f"decoder{level}", x)
        return self._run("conv", x)[..., :height, :width]

    def _run(self, child: str, x: Tensor) -> Tensor:
        return self.get_submodule(child)(x)
