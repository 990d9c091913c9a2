"""Networks with named cuts: one file a backbone, and the line in `BACKBONES` that makes it known.

They know torch, MONAI, `errors` and `randomness`, and nothing of tasks, methods or sites.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from polyclinic.errors import BadInput
from polyclinic.models.backbone import Backbone, join, split
from polyclinic.models.lenet import LeNet5
from polyclinic.models.norms import NORMS, norm_names, statistics_names
from polyclinic.models.resnet import ResNet18, ResNet34
from polyclinic.models.small_cnn import SmallCNN
from polyclinic.models.unet import UNet
from polyclinic.randomness import seeded
from polyclinic.settings import nearest

BACKBONES: dict[str, type[Backbone]] = {
    backbone.name: backbone for backbone in (SmallCNN, LeNet5, ResNet18, ResNet34, UNet)
}

__all__ = [
    "BACKBONES",
    "NORMS",
    "Backbone",
    "build",
    "cuts",
    "describe",
    "initial_weights",
    "join",
    "norm_names",
    "parameter_count",
    "split",
    "statistics_names",
]


def build(backbone: str, *, channels: int, outputs: int, size: int, norm: str = "batch") -> Backbone:
    """A new network for images [B, channels, size, size]; its weights are drawn from torch's global state."""
    kind = _find(backbone)
    if norm not in NORMS:
        raise BadInput(_no_such("norm", norm, list(NORMS)))
    return kind(channels, outputs, size, norm)


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
    return f"{_find(backbone).description}; cuts: {', '.join(cuts(backbone))}"


def cuts(backbone: str) -> tuple[str, ...]:
    """The names of the stages after which this backbone may be split."""
    return tuple(_find(backbone).stages)[:-1]


def _find(backbone: str) -> type[Backbone]:
    if backbone not in BACKBONES:
        raise BadInput(_no_such("backbone", backbone, sorted(BACKBONES)))
    return BACKBONES[backbone]


def _no_such(field: str, word: str, choices: list[str]) -> str:
    hint = nearest(word, choices)
    return f"model.{field}: no such choice: '{word}'{hint}; choose one of {', '.join(choices)}"
