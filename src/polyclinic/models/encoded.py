"""An encoder that nobody trains, with a linear head: what one-round methods fit.

The encoder's weights are public and the same everywhere, so they are no part of the model's weights: only the head is
trained, sent and saved. Whoever uses the model needs the same encoder, which checks its weights itself.
"""

from __future__ import annotations

import functools
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyclinic.encoders import ENCODERS, Encoder
from polyclinic.models.backbone import Backbone


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


class Encoded(Backbone):
    """Cut `features` lies between the encoder and the head."""

    encoder_class: ClassVar[type[Encoder]]
    stages: ClassVar[dict[str, tuple[str, ...]]] = {"features": ("features",), "head": ("fc",)}

    def __init__(self, channels: int, outputs: int, size: int, norm: str) -> None:
        super().__init__(channels, outputs, size, norm)
        self.features = EncoderFeatures(self.encoder_class)
        self.fc = nn.Linear(self.encoder_class.width, outputs)

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
    return type(f"{encoder.__name__}Head", (Encoded,), facts)


@functools.lru_cache(maxsize=4)
def _encoder(encoder: type[Encoder], device: torch.device, side: int | None) -> Encoder:
    """One encoder of a process for all networks that use it."""
    return encoder(device) if side is None else encoder(device, side)
