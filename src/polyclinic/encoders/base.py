"""What every encoder is: a network with public weights that gives a vector for each image."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

BATCH = 64


class Encoder(ABC):
    """One subclass per encoder. Nobody trains it, so its weights are the same for all."""

    width: ClassVar[int]  #: D, the length of a feature vector

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)

    def features(self, images: Tensor) -> Tensor:
        """Features float32 [N, D] on the CPU of images uint8 [N, C, H, W] with one or three channels."""
        with torch.no_grad():
            found = [self.encode(self._prepared(batch)).float().cpu() for batch in images.split(BATCH)]
        return torch.cat(found) if found else torch.zeros(0, self.width)

    @abstractmethod
    def encode(self, images: Tensor) -> Tensor:
        """Features [B, D] of images float [B, 3, H, W] in [0, 1] on the device."""

    def _prepared(self, images: Tensor) -> Tensor:
        return images.to(self.device).float().div(255).expand(-1, 3, -1, -1)
