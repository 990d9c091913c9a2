"""Networks with named cuts: one file a backbone, and the line in `BACKBONES` that makes it known.

They know torch, MONAI, `errors` and `randomness`, and nothing of tasks, methods or sites.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polyclinic.errors import BadInput
from polyclinic.models.backbone import Backbone, join, split
from polyclinic.models.felicia_cnns import CNN32x64x128, CNN64x128x64x32
from polyclinic.models.imported import imported, is_importable
from polyclinic.models.lenet import LeNet5
from polyclinic.models.norms import NORMS, norm_names, statistics_names
from polyclinic.models.resnet import ResNet18, ResNet34, ResNet50, ResNet101, ResNet152
from polyclinic.models.small_cnn import SmallCNN
from polyclinic.models.unet import UNet
from polyclinic.models.unet_512 import UNet512
from polyclinic.models.weights_file import RANDOM, Fitted, WeightsFile, read_weights
from polyclinic.randomness import seeded
from polyclinic.registry import Registry
from polyclinic.settings import no_such_choice

#: a further backbone is one file and one line here, or a plug-in
BACKBONES: Registry[type[Backbone]] = Registry(
    "polyclinic.backbones",
    {
        "small-cnn": SmallCNN,
        "lenet5": LeNet5,
        "cnn-32-64-128": CNN32x64x128,
        "cnn-64-128-64-32": CNN64x128x64x32,
        "resnet18": ResNet18,
        "resnet34": ResNet34,
        "resnet50": ResNet50,
        "resnet101": ResNet101,
        "resnet152": ResNet152,
        "unet": UNet,
        "unet-512": UNet512,
    },
    base=Backbone,
)

__all__ = [
    "BACKBONES",
    "NORMS",
    "RANDOM",
    "Backbone",
    "Fitted",
    "WeightsFile",
    "build",
    "cuts",
    "describe",
    "find",
    "initial_weights",
    "is_importable",
    "join",
    "norm_names",
    "parameter_count",
    "read_weights",
    "split",
    "statistics_names",
]


def build(
    backbone: str,
    *,
    channels: int,
    outputs: int,
    size: int,
    norm: str = "batch",
    arguments: Mapping[str, Any] | None = None,
) -> Backbone:
    """A new network for images [B, channels, size, size]; its weights are drawn from torch's global state."""
    kind = find(backbone, size=size, arguments=arguments)
    if norm not in NORMS:
        raise BadInput(f"model.norm: {no_such_choice(norm, list(NORMS))}")
    return kind(channels, outputs, size, norm)


def find(backbone: str, *, size: int, arguments: Mapping[str, Any] | None = None) -> type[Backbone]:
    """The class of a backbone: by its name, or by its place, `package.module:callable`, with arguments."""
    if is_importable(backbone):
        return imported(backbone, arguments or {}, size)
    if arguments:
        raise BadInput(f"model.arguments: are for importable networks, and '{backbone}' takes none; leave them out")
    return _find(backbone)


def initial_weights(builder: Callable[[], nn.Module], seed: int) -> dict[str, Tensor]:
    """The state dict of the network that `builder` makes when torch is seeded with `seed`.

    Drawn on the CPU, so it is the same on every machine; torch's global random state is left as it was.
    """
    with seeded(seed), torch.device("cpu"):
        return {name: tensor.detach().clone() for name, tensor in builder().state_dict().items()}


def parameter_count(model: nn.Module) -> int:
    """How many numbers training can change."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def describe(backbone: str) -> str:
    """One line about a backbone and its cuts, for lists and help texts."""
    return f"{_find(backbone).summary}; cuts: {', '.join(cuts(backbone))}"


def cuts(backbone: str) -> tuple[str, ...]:
    """The names of the stages after which this backbone may be split."""
    return tuple(_find(backbone).stages)[:-1]


def _find(backbone: str) -> type[Backbone]:
    if backbone not in BACKBONES:
        raise BadInput(f"model.backbone: {no_such_choice(backbone, sorted(BACKBONES))}")
    return BACKBONES[backbone]
