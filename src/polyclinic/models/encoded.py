"""An encoder that nobody trains, with a linear head: what one-round methods fit.

The encoder's weights are public and the same everywhere, so they are no part of the model's weights: only the head is
trained, sent and saved. Whoever uses the model needs the same encoder, which checks its weights itself.
"""

from __future__ import annotations

import functools
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyclinic.models.backbone import Backbone
from polyclinic.models.encoders import ENCODERS, Encoder


class EncoderFeatures(nn.Module):
    """Features [B, D] of images [B, C, H, W] in [0, 1]."""

    def __init__(self, encoder: type[Encoder]) -> None:
        super().__init__()
        self.encoder_class = encoder
        self.side: int | None = None

    def encoder(self, device: torch.device) -> Encoder:
        return _encoder(self.encoder_class, device, self.side)

    def forward(self, images: Tensor) -> Tensor:
        if images.device.type == "meta":
            return images.new_zeros(len(images), self.encoder_class.width)
        return self.encoder(images.device).of_unit(images)


class QuadraticHead(nn.Module):
    """Outputs [B, T] that are quadratic in the features [B, D]: what Gaussians of different spread for each class need.

    `diagonal`: squares of single features only, and no products of two.
    """

    def __init__(self, features: int, outputs: int, *, diagonal: bool) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(features))
        self.weight = nn.Parameter(torch.zeros(outputs, features))
        self.bias = nn.Parameter(torch.zeros(outputs))
        shape = (outputs, features) if diagonal else (outputs, features, features)
        self.products = nn.Parameter(torch.zeros(shape))

    def forward(self, features: Tensor) -> Tensor:
        x = features - self.get_buffer("center")
        linear = x @ self.weight.T + self.bias
        if self.products.dim() == 2:
            return linear + x.square() @ self.products.T
        return linear + torch.stack([((x @ one) * x).sum(1) for one in self.products], 1)


class Encoded(Backbone):
    """Cut `features` lies between the encoder and the head."""

    encoder_class: ClassVar[type[Encoder]]
    norm_layers: ClassVar[bool | None] = False
    stages: ClassVar[dict[str, tuple[str, ...]]] = {"features": ("features",), "head": ("fc",)}

    def __init__(self, channels: int, outputs: int, size: int, norm: str) -> None:
        super().__init__(channels, outputs, size, norm)
        self.features = EncoderFeatures(self.encoder_class)
        self.frozen = ("features",)
        self.fc: nn.Module = nn.Linear(self.encoder_class.width, outputs)

    @property
    def outputs(self) -> int:
        return len(self.fc.get_parameter("bias"))

    def use_head(self, head: str) -> None:
        """Have another head than a linear one: `diagonal` or `quadratic`."""
        if head != "linear":
            self.fc = QuadraticHead(self.encoder_class.width, self.outputs, diagonal=head == "diagonal")

    def run_stage(self, stage: str, x: Tensor) -> Tensor:
        """The head computes in float32 whatever the study does: a head in closed form subtracts large numbers, of
        which bfloat16 would leave nothing."""
        if stage != "head" or x.device.type == "meta":
            return super().run_stage(stage, x)
        with torch.autocast(x.device.type, enabled=False):
            return super().run_stage(stage, x.float())

    def resize_to(self, side: int, size: int) -> None:
        """The encoder itself resizes images."""
        self.features.side = side


def encoded(name: str) -> type[Encoded]:
    """The backbone that is an encoder of the registry with a linear head; the same class every time."""
    return _encoded(name, ENCODERS[name])


@functools.lru_cache(maxsize=32)
def _encoded(name: str, encoder: type[Encoder]) -> type[Encoded]:
    first_line = (encoder.__doc__ or "").strip().splitlines() or [f"{encoder.width} features"]
    facts = {"name": name, "summary": f"a linear head on an encoder: {first_line[0]}", "encoder_class": encoder}
    facts["__module__"] = __name__  # and not that of whoever makes the class
    return type(f"{encoder.__name__}Head", (Encoded,), facts)


@functools.lru_cache(maxsize=4)
def _encoder(encoder: type[Encoder], device: torch.device, side: int | None) -> Encoder:
    """One encoder of a process for all networks that use it."""
    return encoder(device) if side is None else encoder(device, side)
