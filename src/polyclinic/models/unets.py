"""U-Nets for masks: MONAI's BasicUNet, and the one of Qu et al. 2022 (Section 4.3).

Qu's has four levels, a bottleneck of 512 filters, batch norm and ReLU. The paper takes it pretrained on the brain MRI
of Buda et al. 2019. Layers have the state-dict names of the network that Buda published, so that its weights load
(`model.weights`); ours gives logits, as every backbone does.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.extras import need
from polyclinic.models.backbone import GROUPS, Backbone, norm_layer, with_norm

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
