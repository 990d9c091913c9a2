"""A network made of named stages, which can be cut in two between any of them and joined again."""

from __future__ import annotations

from typing import ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from polyclinic.errors import BadInput


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

    present: tuple[str, ...]

    def __init__(self, channels: int, outputs: int, size: int, norm: str) -> None:
        super().__init__()
        self.present = tuple(self.stages)

    @classmethod
    def without_weights(cls, size: int, norm: str) -> Self:
        """A network to look at, for one channel and two outputs: its weights have no memory and no values."""
        with torch.device("meta"):
            return cls(1, 2, size, norm)

    @property
    def cuts(self) -> tuple[str, ...]:
        """The stages after which this network may be split."""
        return self.present[:-1]

    @classmethod
    def default_cut(cls) -> str:
        """Where a method cuts the network unless the study says where."""
        return next(iter(cls.stages))

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.present:
            x = self.run_stage(stage, x)
        return x

    def run_stage(self, stage: str, x: Tensor) -> Tensor:
        """What `stage` does to `x`: its children one after the other, unless a backbone says otherwise."""
        for child in self.stages[stage]:
            x = self.get_submodule(child)(x)
        return x


B = TypeVar("B", bound=Backbone)


def split(model: B, cut: str) -> tuple[B, B]:
    """The part up to and including stage `cut`, and the rest. Both share their parameters with `model`."""
    if cut not in model.cuts:
        raise BadInput(f"model.cut: {model.name} has no cut '{cut}'; choose one of {', '.join(model.cuts)}")
    after = model.present.index(cut) + 1
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
    whole.present = present
    for name, child in rest.named_children():
        whole.add_module(name, child)
    return whole


def _part(model: B, present: tuple[str, ...]) -> B:
    """The `present` stages of `model` as a network of their own, made without drawing new weights."""
    part = type(model).__new__(type(model))
    nn.Module.__init__(part)
    part.present = present
    for stage in present:
        for child in model.stages[stage]:
            part.add_module(child, model.get_submodule(child))
    part.training = model.training
    return part
