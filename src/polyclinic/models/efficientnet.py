"""EfficientNet-Lite0 (Google, 2020) as a backbone, and as the encoder of a U-Net.

`model.weights = "public"` are the ImageNet weights of a package.
"""

import re
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.metrics.networks.efficientnet import (
    EPS,
    LAST_OF_LEVEL,
    LEVEL_CHANNELS,
    PACKAGE,
    SHA256,
    VECTOR_WIDTH,
    SameConv2d,
    make_blocks,
    public_weights,
)
from polyclinic.models.backbone import Backbone, norm_layer
from polyclinic.models.weights_file import WeightsFile

BLOCKS = 16
#: smaller images are enlarged to this side: the public weights know larger ones, and below it they see little
SMALLEST_SIDE = 128


class PublicInput(nn.Module):
    """Images in [0, 1] as the public weights know them: three channels (grey is repeated), from -1 to 1."""

    def forward(self, images: Tensor) -> Tensor:
        return (images.expand(-1, 3, -1, -1) * 255 - 127) / 128


class PublicBackbone(Backbone):
    """A network with the stem and the sixteen blocks, whose public weights are those of the package."""

    norm_layers: ClassVar[bool | None] = True

    @classmethod
    def public_weights(cls) -> WeightsFile:
        tensors = {cls.own_name(name): tensor for name, tensor in public_weights().items()}
        return WeightsFile(Path(PACKAGE), SHA256, tensors)

    @classmethod
    def own_name(cls, name: str) -> str:
        """`_blocks.0._bn1.weight` of the package is `block1._bn1.weight` here, `_bn0.weight` is `bn0.weight`."""
        block = re.fullmatch(r"_blocks\.(\d+)\.(.*)", name)
        return f"block{int(block[1]) + 1}.{block[2]}" if block else name.removeprefix("_")

    @classmethod
    def input_side(cls, size: int) -> int:
        return max(size, SMALLEST_SIDE)

    def add_encoder(self, norm: str) -> None:
        """Make the stem and the blocks."""
        self.public_input = PublicInput()
        self.conv_stem = SameConv2d(3, 32, 3, 2, bias=False)
        self.bn0 = norm_layer(norm, 32, EPS)
        self.relu0 = nn.ReLU6()
        for number, block in enumerate(make_blocks(partial(norm_layer, norm, eps=EPS)), start=1):
            self.add_module(f"block{number}", block)


class EfficientNetLite0(PublicBackbone):
    """Cut `blockN` lies after the N-th block, `stem` before the first; block 1, 3, 5, 11 and 16 end a level."""

    name: ClassVar[str] = "efficientnet-lite0"
    summary: ClassVar[str] = "EfficientNet-Lite0, 3.4 million parameters: has public weights (ImageNet)"
    stages: ClassVar[dict[str, tuple[str, ...]]] = {
        "stem": ("public_input", "conv_stem", "bn0", "relu0"),
        **{f"block{number}": (f"block{number}",) for number in range(1, BLOCKS + 1)},
        "head": ("conv_head", "bn1", "relu1", "avgpool", "flatten", "fc"),
    }

    def __init__(self, channels: int, outputs: int, size: int, norm: str) -> None:
        super().__init__(channels, outputs, size, norm)
        self.add_encoder(norm)
        self.conv_head = nn.Conv2d(320, VECTOR_WIDTH, 1, bias=False)
        self.bn1 = norm_layer(norm, VECTOR_WIDTH, EPS)
        self.relu1, self.avgpool, self.flatten = nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        self.fc = nn.Linear(VECTOR_WIDTH, outputs)

    @classmethod
    def default_cut(cls) -> str:
        return "block5"


WIDTHS = (16, 24, 40, 80)  # of the decoder's levels, from the finest to the coarsest
ENCODING = tuple(f"block{number}" for number in range(2, BLOCKS + 1))
LEVEL_ENDS = tuple(f"block{number + 1}" for number in LAST_OF_LEVEL)
DECODING = tuple(f"decoder{level}" for level in range(len(WIDTHS), 0, -1))


def decoder(inputs: int, width: int, norm: str) -> nn.Sequential:
    """Two 3x3 convolutions, each with norm and ReLU."""
    layers: list[nn.Module] = []
    for channels in (inputs, width):
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), norm_layer(norm, width), nn.ReLU()]
    return nn.Sequential(*layers)


class UNetEfficientNetLite0(PublicBackbone):
    """Cut `block1` lies after the first block, at half the side: its output is all that the rest needs."""

    name: ClassVar[str] = "unet-efficientnet-lite0"
    summary: ClassVar[str] = "U-Net on EfficientNet-Lite0, 3.8 million parameters: segmentation from public weights"
    stages: ClassVar[dict[str, tuple[str, ...]]] = {
        "stem": ("public_input", "conv_stem", "bn0", "relu0"),
        "block1": ("block1",),
        "rest": (*ENCODING, *DECODING, "final_conv"),
    }
    dense: ClassVar[bool] = True

    def __init__(self, channels: int, outputs: int, size: int, norm: str) -> None:
        super().__init__(channels, outputs, size, norm)
        self.add_encoder(norm)
        below = LEVEL_CHANNELS[-1]
        for level in range(len(WIDTHS), 0, -1):
            self.add_module(f"decoder{level}", decoder(below + LEVEL_CHANNELS[level - 1], WIDTHS[level - 1], norm))
            below = WIDTHS[level - 1]
        self.final_conv = nn.Conv2d(below, outputs, 1)

    @classmethod
    def default_cut(cls) -> str:
        return "block1"

    def run_stage(self, stage: str, x: Tensor) -> Tensor:
        return self._encode_and_decode(x) if stage == "rest" else super().run_stage(stage, x)

    def _encode_and_decode(self, x: Tensor) -> Tensor:
        """[B, 16, H/2, W/2] to [B, outputs, H, W]."""
        levels = [x]
        for name in ENCODING:
            x = self.get_submodule(name)(x)
            if name in LEVEL_ENDS:
                levels.append(x)
        x = levels.pop()
        for name in DECODING:
            skip = levels.pop()
            enlarged = F.interpolate(x, tuple(skip.shape[-2:]), mode="nearest")
            x = self.get_submodule(name)(torch.cat([enlarged, skip], 1))
        return F.interpolate(self.get_submodule("final_conv")(x), scale_factor=2.0, mode="bilinear")
