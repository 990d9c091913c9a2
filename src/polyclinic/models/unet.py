"""A U-Net for masks: MONAI's BasicUNet with a cut after its first block."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from polyclinic.extras import need
from polyclinic.models.backbone import Backbone
from polyclinic.models.norms import GROUPS, with_norm

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
            act=("LeakyReLU", {"negative_slope": 0.1}),  # not in place: see resnet.py
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
