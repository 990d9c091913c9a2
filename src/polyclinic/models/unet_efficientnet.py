"""A U-Net whose encoder is EfficientNet-Lite0: segmentation that begins with public weights."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.metrics.networks.efficientnet import LAST_OF_LEVEL, LEVEL_CHANNELS
from polyclinic.models.backbone import Backbone
from polyclinic.models.efficientnet import BLOCKS, EfficientNetLite0, add_encoder
from polyclinic.models.norms import norm_layer
from polyclinic.models.weights_file import WeightsFile

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


class UNetEfficientNetLite0(Backbone):
    """Cut `block1` lies after the first block, at half the side: its output is all that the rest needs."""

    name: ClassVar[str] = "unet-efficientnet-lite0"
    summary: ClassVar[str] = "U-Net on EfficientNet-Lite0, 3.8 million parameters: segmentation from public weights"
    norm_layers: ClassVar[bool | None] = True
    stages: ClassVar[dict[str, tuple[str, ...]]] = {
        "stem": ("public_input", "conv_stem", "bn0", "relu0"),
        "block1": ("block1",),
        "rest": (*ENCODING, *DECODING, "final_conv"),
    }
    dense: ClassVar[bool] = True

    def __init__(self, channels: int, outputs: int, size: int, norm: str) -> None:
        super().__init__(channels, outputs, size, norm)
        add_encoder(self, norm)
        below = LEVEL_CHANNELS[-1]
        for level in range(len(WIDTHS), 0, -1):
            self.add_module(f"decoder{level}", decoder(below + LEVEL_CHANNELS[level - 1], WIDTHS[level - 1], norm))
            below = WIDTHS[level - 1]
        self.final_conv = nn.Conv2d(below, outputs, 1)

    @classmethod
    def public_weights(cls) -> WeightsFile:
        return EfficientNetLite0.public_weights()

    @classmethod
    def own_name(cls, name: str) -> str:
        return EfficientNetLite0.own_name(name)

    @classmethod
    def input_side(cls, size: int) -> int:
        return EfficientNetLite0.input_side(size)

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
            x = self.get_submodule(name)(torch.cat([_enlarged(x, skip.shape[-2:]), skip], 1))
        return F.interpolate(self.get_submodule("final_conv")(x), scale_factor=2.0, mode="bilinear")


def _enlarged(x: Tensor, shape: torch.Size) -> Tensor:
    return F.interpolate(x, tuple(shape), mode="nearest")
