"""What every encoder is: a network with public weights that gives a vector for each image."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

#: images that go through the network at once; the last batch is filled up with black images, so that the features of an
#: image do not depend on how many others there are (libraries compute batches of different sizes in different ways)
BATCH = 32


class Encoder(ABC):
    """One subclass per encoder. Nobody trains it, so its weights are the same for all."""

    width: ClassVar[int]  #: D, the length of a feature vector
    side: ClassVar[int | None] = None  #: the side to which images are resized; None leaves them as they are
    batch: ClassVar[int] = BATCH  #: images at once; fewer for a slow encoder, as a site with one image computes so many

    def __init__(self, device: str | torch.device = "cpu", side: int | None = None) -> None:
        """`side` is another side of the images than the encoder's own."""
        self.device = torch.device(device)
        self.image_side = side or self.side

    @property
    def identity(self) -> str | None:
        """What names the weights, such as their SHA-256. Features are kept on disk only where there is one."""
        return None

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Features float32 [N, D] on the CPU of images uint8 [N, C, H, W] with one or three channels."""
        found = [self._of_batch(batch) for batch in images.split(self.batch)] if len(images) else []
        return torch.cat(found) if found else torch.zeros(0, self.width)

    @torch.no_grad()
    def of_unit(self, images: Tensor) -> Tensor:
        """Features float32 [B, D] of images float [B, 1 or 3, H, W] in [0, 1] on the device."""
        with torch.autocast(images.device.type, enabled=False):
            return self.encode(self._resized(images.float().expand(-1, 3, -1, -1))).float()

    @abstractmethod
    def encode(self, images: Tensor) -> Tensor:
        """Features [B, D] of images float [B, 3, H, W] in [0, 1] on the device."""

    def _of_batch(self, images: Tensor) -> Tensor:
        count = len(images)
        full = F.pad(images, (0, 0, 0, 0, 0, 0, 0, self.batch - count)).to(self.device).float().div(255)
        return self.of_unit(full)[:count].cpu()

    def _resized(self, images: Tensor) -> Tensor:
        side = self.image_side
        if side is None or images.shape[-2:] == (side, side):
            return images
        return F.interpolate(images, (side, side), mode="bilinear", antialias=True)
