"""Principal component analysis (PCA) of images: features that need no network."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Components:
    """Leading principal components of some images: mean [D], directions [D, P]."""

    mean: Tensor
    directions: Tensor

    def project(self, images: Tensor) -> Tensor:
        """Coordinates [N, P] of uint8 images [N, C, H, W]."""
        return (_pixels(images) - self.mean) @ self.directions


def principal_components(images: Tensor, count: int = 50) -> Components:
    """Up to `count` principal components of uint8 images [N, C, H, W]; each has its largest entry positive."""
    rows = _pixels(images)
    mean = rows.mean(0)
    wanted = min(count, len(rows) - 1, rows.shape[1])
    _, _, found = torch.linalg.svd((rows - mean).double(), full_matrices=False)
    directions = found[:wanted].T
    largest = directions.gather(0, directions.abs().argmax(0, keepdim=True))
    return Components(mean, (directions * largest.sign()).float())


def _pixels(images: Tensor) -> Tensor:
    """float32 [N, D] in [0, 1]."""
    return images.flatten(1).float() / 255
