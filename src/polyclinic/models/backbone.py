"""A network made of named stages, which can be cut in two between any of them and joined again; its norm layers."""

import math
from typing import ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from polyclinic.errors import BadInput
from polyclinic.models.weights_file import WeightsFile

# --- norm layers ----------------------------------------------------------------------------------------------


NORMS = ("batch", "group", "frozen", "instance")
GROUPS = 16  # at most; a layer whose channels 16 does not divide gets the largest common divisor


class FrozenBatchNorm2d(nn.Module):
    """Batch norm with the mean, variance, factor and offset that came with public weights; nobody trains it.

    Its tensors have the names of `nn.BatchNorm2d`, so that published weights load. It mixes no patients.
    """

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self, x: Tensor) -> Tensor:
        buffers = dict(self.named_buffers())
        mean, variance = buffers["running_mean"], buffers["running_var"]
        return F.batch_norm(x, mean, variance, buffers["weight"], buffers["bias"], eps=self.eps)


def norm_layer(norm: str, channels: int, eps: float = 1e-5) -> nn.Module:
    """Batch, frozen batch, group or instance norm. Only the first mixes patients, which differential privacy does not
    allow."""
    if norm == "frozen":
        return FrozenBatchNorm2d(channels, eps)
    if norm == "batch":
        return nn.BatchNorm2d(channels, eps)
    return nn.GroupNorm(channels if norm == "instance" else math.gcd(GROUPS, channels), channels)


def norm_names(model: nn.Module) -> set[str]:
    """State-dict names of every parameter and buffer of batch-norm layers (FedBN keeps these local)."""
    return {prefix + name for prefix, layer in _batch_norms(model) for name in layer.state_dict()}


def statistics_names(model: nn.Module) -> set[str]:
    """State-dict names of what batch norm learns about images without gradients: means, variances, counts."""
    return {prefix + name for prefix, layer in _batch_norms(model) for name, _ in layer.named_buffers()}


def _batch_norms(model: nn.Module) -> list[tuple[str, nn.Module]]:
    layers = [(path, layer) for path, layer in model.named_modules() if isinstance(layer, _BatchNorm)]
    return [(f"{path}." if path else "", layer) for path, layer in layers]


def with_norm(network: nn.Module, norm: str) -> nn.Module:
    """The network with this norm in the place of every batch-norm layer."""
    if norm == "batch":
        return network
    if isinstance(network, _BatchNorm):
        return norm_layer(norm, network.num_features, network.eps)
    for name, child in network.named_children():
        setattr(network, name, with_norm(child, norm))
    return network


# --- networks of named stages ---------------------------------------------------------------------------------


class Resize(nn.Module):
    """Images or maps of any size as squares of `side`, on the device that they lie on."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2:] == (self.side, self.side):
            return x
        return F.interpolate(x.float(), (self.side, self.side), mode="bilinear", antialias=True)


#: children that do not belong to a stage: they come before the first one and after the last one
INPUT, OUTPUT = "resize_input", "resize_output"


class Backbone(nn.Module):
    """A whole network, or one part of it: the consecutive stages in `present`.

    A subclass names its stages in the order in which they run, each with the children that it owns, and makes
    those children in `__init__`. All it knows lies in class attributes and children, so a part is nothing but
    some of the children, under their usual state-dict names.

    Input: float32 [B, channels, size, size]. Output: [B, outputs], or [B, outputs, size, size] where `dense`.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    stages: ClassVar[dict[str, tuple[str, ...]]]
    dense: ClassVar[bool] = False  #: gives a map with a value per pixel (segmentation), not a vector per image
    volumes: ClassVar[bool] = False  #: takes volumes [B, channels, X, Y, Z]; `size` has three sides
    #: whether it has layers that `model.norm` chooses, and no others that differential privacy forbids; None: nobody
    #: knows before one is built
    norm_layers: ClassVar[bool | None] = None

    present: tuple[str, ...]
    frozen: tuple[str, ...]  #: stages that are not trained (`freeze`)
    #: shape of what the frozen stages give for an image, where that may come in the place of images
    frozen_shape: tuple[int, ...] | None = None

    def __init__(self, channels: int, outputs: int, size: int, norm: str) -> None:
        super().__init__()
        self.present, self.frozen = tuple(self.stages), ()

    @classmethod
    def without_weights(cls, size: int, norm: str) -> Self:
        """A network to look at, for one channel and two outputs: its weights have no memory and no values."""
        with torch.device("meta"):
            return cls(1, 2, size, norm)

    @classmethod
    def public_weights(cls) -> WeightsFile | None:
        """The weights that `model.weights = "public"` means; None where there are none. Check their SHA-256 here."""
        return None

    @classmethod
    def own_name(cls, name: str) -> str:
        """The state-dict name of a tensor that published weights call `name`."""
        return name

    @classmethod
    def input_side(cls, size: int) -> int:
        """The side to which images of `size` are resized, unless the study says otherwise (`model.input_size`)."""
        return size

    def resize_to(self, side: int, size: int) -> None:
        """Have images of `size` resized to `side` before the first layer, and maps back to `size` after the last."""
        self.resize_input = Resize(side)
        if self.dense:
            self.resize_output = Resize(size)

    @property
    def resized_to(self) -> int | None:
        """The side to which images are resized before the first layer; None where they are not."""
        return self.resize_input.side if INPUT in self._modules else None

    def freeze(self, cut: str) -> None:
        """Train nothing up to and including stage `cut`; its batch norm then takes the statistics that it has."""
        after = _place_of(self, cut, "model.freeze") + 1
        self.frozen = self.present[:after]
        for stage in self.frozen:
            for child in self.stages[stage]:
                self.get_submodule(child).requires_grad_(False)
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for stage in self.frozen:
            for child in self.stages[stage]:
                self.get_submodule(child).eval()
        return self

    @property
    def cuts(self) -> tuple[str, ...]:
        """The stages after which this network may be split."""
        return self.present[:-1]

    @classmethod
    def default_cut(cls) -> str:
        """The cut that a method takes unless the study names one."""
        return next(iter(cls.stages))

    def forward(self, x: Tensor) -> Tensor:
        stages = self.present
        if self.frozen_shape is not None and tuple(x.shape[1:]) == self.frozen_shape:
            stages = self.present[len(self.frozen) :]
        elif INPUT in self._modules:
            x = self.resize_input(x)
        for stage in stages:
            x = self.run_stage(stage, x)
        return self.resize_output(x) if OUTPUT in self._modules else x

    def run_stage(self, stage: str, x: Tensor) -> Tensor:
        """The output of `stage` for `x`: its children one after the other, unless a backbone says otherwise."""
        for child in self.stages[stage]:
            x = self.get_submodule(child)(x)
        return x


B = TypeVar("B", bound=Backbone)


def split(model: B, cut: str) -> tuple[B, B]:
    """The part up to and including stage `cut`, and the rest. Both share their parameters with `model`."""
    after = _place_of(model, cut, "model.cut") + 1
    return _part(model, model.present[:after]), _part(model, model.present[after:])


def join(front: B, rest: B) -> B:
    """The network of these two parts, which may have been made apart; it shares their parameters."""
    present = front.present + rest.present
    if type(front) is not type(rest) or present != tuple(front.stages):
        raise BadInput(
            f"model.cut: {front.name} up to '{front.present[-1]}' and {rest.name} from '{rest.present[0]}' "
            "do not make one network; join the two parts of the same split"
        )
    whole = _part(front, front.present)
    whole.present, whole.frozen = present, front.frozen + rest.frozen
    for name, child in rest.named_children():
        whole.add_module(name, child)
    return whole


def _place_of(model: Backbone, cut: str, setting: str) -> int:
    if cut not in model.cuts:
        raise BadInput(f"{setting}: {model.name} has no cut '{cut}'; choose one of {', '.join(model.cuts)}")
    return model.present.index(cut)


def _part(model: B, present: tuple[str, ...]) -> B:
    """The `present` stages of `model` as a network of their own, made without drawing new weights."""
    part = type(model).__new__(type(model))
    nn.Module.__init__(part)
    part.present, part.frozen = present, tuple(stage for stage in present if stage in model.frozen)
    ends = {INPUT: present[0] == model.present[0], OUTPUT: present[-1] == model.present[-1]}
    children = [child for stage in present for child in model.stages[stage]]
    for child in [*children, *(name for name, here in ends.items() if here and name in model._modules)]:
        part.add_module(child, model.get_submodule(child))
    part.training = model.training
    return part
