"""Networks with named cuts: a class for each backbone, and the line in `BACKBONES` that makes it known.

They know torch, MONAI, `metrics.networks`, `errors` and `randomness`, and nothing of tasks, methods or sites.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyclinic.errors import BadInput
from polyclinic.models import networks
from polyclinic.models.backbone import NORMS, Backbone, join, norm_names, split, statistics_names
from polyclinic.models.efficientnet import EfficientNetLite0, UNetEfficientNetLite0
from polyclinic.models.encoders import ENCODERS, Encoded, encoded
from polyclinic.models.imported import imported
from polyclinic.models.volume_networks import DynUNet, SegResNet, VolumeNetwork
from polyclinic.models.weights_file import PUBLIC, RANDOM, Fitted, WeightsFile, read_weights
from polyclinic.randomness import seeded
from polyclinic.registry import Registry
from polyclinic.settings import no_such_choice

#: a further backbone is one file and one line here, or a plug-in
BACKBONES: Registry[type[Backbone]] = Registry(
    "polyclinic.backbones",
    {
        "small-cnn": networks.SmallCNN, "lenet5": networks.LeNet5, "cnn-32-64-128": networks.CNN32x64x128,
        "cnn-64-128-64-32": networks.CNN64x128x64x32, "resnet18": networks.ResNet18, "resnet34": networks.ResNet34,
        "resnet50": networks.ResNet50, "resnet101": networks.ResNet101, "resnet152": networks.ResNet152,
        "unet": networks.UNet, "unet-512": networks.UNet512, "efficientnet-lite0": EfficientNetLite0,
        "unet-efficientnet-lite0": UNetEfficientNetLite0, "dynunet": DynUNet, "segresnet": SegResNet,
    },
    base=Backbone,
)  # fmt: skip

__all__ = [
    "BACKBONES", "NORMS", "PUBLIC", "RANDOM", "Backbone", "Encoded", "Fitted", "WeightsFile", "build",
    "check_public_weights", "cuts", "describe", "find", "find_weights", "initial_weights", "is_importable", "join",
    "norm_names", "parameter_count", "public_weights", "read_weights", "registry_of", "split", "statistics_names",
]  # fmt: skip


def build(
    backbone: str,
    *,
    channels: int,
    outputs: int,
    size: int,
    norm: str = "batch",
    arguments: Mapping[str, Any] | None = None,
    input_size: int | None = None,
    freeze: str | None = None,
    head: str = "linear",
) -> Backbone:
    """A new network for images [B, channels, size, size]; its weights are drawn from torch's global state.

    It resizes images to `input_size`, and does not train what lies up to the cut `freeze`. The head of an encoder can
    be `diagonal` or `quadratic` instead of linear.
    """
    kind = find(backbone, size=input_size or size, arguments=arguments)
    if norm not in NORMS:
        raise BadInput(f"model.norm: {no_such_choice(norm, list(NORMS))}")
    side = input_size or kind.input_side(size)
    network = kind(channels, outputs, side, norm)
    if side != size or (input_size is not None and issubclass(kind, Encoded)):
        network.resize_to(side, size)
    if isinstance(network, Encoded):
        network.use_head(head)
    if freeze is not None:
        network.freeze(freeze)
    return network


def is_importable(backbone: str) -> bool:
    """True for a backbone that is named by its place, `package.module:callable`."""
    return ":" in backbone


def find(backbone: str, *, size: int, arguments: Mapping[str, Any] | None = None) -> type[Backbone]:
    """The class of a backbone: by its name, an encoder's name, or its place (`package.module:callable`, arguments)."""
    if is_importable(backbone):
        return imported(backbone, arguments or {}, size)
    if arguments and issubclass(kind := _find(backbone), VolumeNetwork):
        return kind.with_arguments(arguments)
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
    """Number of weights that training can change."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def describe(backbone: str) -> str:
    """One line about a backbone and its cuts, for lists and help texts."""
    return f"{_find(backbone).summary}; cuts: {', '.join(cuts(backbone))}"


def cuts(backbone: str) -> tuple[str, ...]:
    """The names of the stages after which this backbone may be split."""
    return tuple(_find(backbone).stages)[:-1]


def registry_of(backbone: str) -> Registry[Any]:
    """The registry of a backbone: among the backbones, or among the encoders, which get a linear head."""
    return ENCODERS if backbone not in BACKBONES and backbone in ENCODERS else BACKBONES


def public_weights(backbone: str) -> WeightsFile:
    """The weights that `model.weights = "public"` means; BadInput where a backbone has none."""
    found = None if is_importable(backbone) else _find(backbone).public_weights()
    if found is None:
        have = [name for name, kind in BACKBONES.working().items() if kind.public_weights.__func__ is not _NO_WEIGHTS]  # type: ignore[attr-defined]
        raise BadInput(f"model.weights: '{backbone}' has no public weights; choose one of {', '.join(have)}, or a file")
    return found


def check_public_weights(backbone: str) -> None:
    """BadInput where a backbone has no public weights. Those of the package are not opened: it takes torch."""
    kind = BACKBONES.builtin.get(backbone)
    if kind is None or kind.public_weights.__func__ is _NO_WEIGHTS:  # type: ignore[attr-defined]
        public_weights(backbone)


def find_weights(
    weights: str, backbone: str, *, size: int, arguments: Mapping[str, Any] | None = None
) -> WeightsFile | None:
    """The first weights that `model.weights` names; None where they are drawn, or an encoder's own."""
    if weights == RANDOM:
        return None
    kind = find(backbone, size=size, arguments=arguments)
    if weights != PUBLIC:
        return read_weights(Path(weights)).renamed(kind.own_name)
    return None if issubclass(kind, Encoded) else public_weights(backbone)


_NO_WEIGHTS = Backbone.public_weights.__func__  # type: ignore[attr-defined]


def _find(backbone: str) -> type[Backbone]:
    if registry_of(backbone) is ENCODERS:
        return encoded(backbone)
    if backbone not in BACKBONES:
        raise BadInput(f"model.backbone: {no_such_choice(backbone, sorted({*BACKBONES, *ENCODERS}))}")
    return BACKBONES[backbone]
