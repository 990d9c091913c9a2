"""How well made images cover real ones: precision and recall (Kynkäänniemi 2019), density and coverage (Naeem 2020).

Distances are between features of images; here the coordinates of the leading principal components of real images, as
FELICIA draws them. Any other features [N, D] do as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyclinic.errors import BadInput

NEIGHBOURS = 5
CHUNK = 512  # rows of a distance matrix at a time


@dataclass(frozen=True)
class Components:
    """Leading principal components of some images: mean [D], directions [D, P]."""

    mean: Tensor
    directions: Tensor

    def of(self, images: Tensor) -> Tensor:
        """Coordinates [N, P] of uint8 images [N, C, H, W]."""
        return (pixels(images) - self.mean) @ self.directions


def components(images: Tensor, count: int = 50) -> Components:
    """Up to `count` principal components of uint8 images [N, C, H, W]; each has its largest entry positive."""
    rows = pixels(images)
    mean = rows.mean(0)
    wanted = min(count, len(rows) - 1, rows.shape[1])
    _, _, found = torch.linalg.svd((rows - mean).double(), full_matrices=False)
    directions = found[:wanted].T
    largest = directions.gather(0, directions.abs().argmax(0, keepdim=True))
    return Components(mean, (directions * largest.sign()).float())


def pixels(images: Tensor) -> Tensor:
    """float32 [N, D] in [0, 1]."""
    return images.flatten(1).float() / 255


def measure(real: Tensor, made: Tensor, neighbours: int = NEIGHBOURS) -> dict[str, float]:
    """precision, recall, density and coverage of features `made` [M, D] against `real` [N, D].

    A ball around each image reaches to its k-th neighbour of the same set. Precision: share of made images in the ball
    of any real one; density: in how many balls, over k. Recall: share of real images in the ball of any made one.
    Coverage: share of real images with a made one in their ball; unlike recall, outliers among made images cannot
    raise it.
    """
    if min(len(real), len(made)) <= neighbours:
        raise BadInput(f"coverage: it needs more than {neighbours} images of either kind; give more")
    reach, own_reach = radii(real, neighbours), radii(made, neighbours)
    in_balls = torch.zeros(len(made))
    recalled, covered = [], []
    for rows, limit in zip(real.split(CHUNK), reach.split(CHUNK), strict=True):
        away = torch.cdist(rows, made)
        in_balls += (away < limit[:, None]).sum(0).cpu()
        recalled.append((away < own_reach[None]).any(1))
        covered.append(away.min(1).values < limit)
    return {
        "precision": float((in_balls > 0).float().mean()),
        "recall": float(torch.cat(recalled).float().mean()),
        "density": float(in_balls.mean() / neighbours),
        "coverage": float(torch.cat(covered).float().mean()),
    }


def radii(features: Tensor, neighbours: int) -> Tensor:
    """The distance of each row to its k-th neighbour, [N]."""
    found = [torch.cdist(rows, features).kthvalue(neighbours + 1, 1).values for rows in features.split(CHUNK)]
    return torch.cat(found)
