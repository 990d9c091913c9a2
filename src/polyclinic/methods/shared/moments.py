"""Sums of features and of their products over a site's images, in whole numbers.

A feature is rounded to a multiple of 2^-12 and limited to +-128, so it is a whole number of at most 19 bits and a sign.
Products have 38 bits, and sums of up to 2^24 images fit into int64. Sums of whole numbers do not depend on their order:
any partition of the same images, over any number of sites, gives the same sums, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polyclinic.errors import WorkFailed

RESOLUTION = 2.0**-12  #: of features
LIMIT = 2.0**7  #: features beyond it count as if they were it
TARGET_RESOLUTION = 2.0**-15  #: of targets, which lie between -1 and 1, or are clipped to +-LIMIT_OF_TARGETS
LIMIT_OF_TARGETS = 4.0
MOST_IMAGES = 2**24
SLACK = 1 + 1e-9  # of float64 beside int64
PIECE = 4096  # rows of one product in float64: its sums stay below 2^53, so that they are exact


@dataclass(frozen=True)
class Moments:
    """Sums over images of (1, features) times itself and times the targets.

    products: int64 [(D + 1)(D + 2) / 2], the upper triangle row by row; its first entry is the number of images.
    cross: int64 [D + 1, T]; squares: int64 [T], of the targets. Units: RESOLUTION and TARGET_RESOLUTION.
    """

    products: Tensor
    cross: Tensor
    squares: Tensor

    @property
    def count(self) -> int:
        return int(self.products[0])

    @property
    def width(self) -> int:
        return len(self.cross) - 1

    def tensors(self) -> dict[str, Tensor]:
        return {"products": self.products, "cross": self.cross, "squares": self.squares}

    def __add__(self, other: Moments) -> Moments:
        check_count(self.count + other.count)
        return Moments(self.products + other.products, self.cross + other.cross, self.squares + other.squares)

    def in_units(self) -> tuple[Tensor, Tensor, Tensor]:
        """Products as a whole matrix float64 [D + 1, D + 1], cross and squares, in units of features and targets."""
        matrix = full(self.products, self.width + 1).double()
        cross, squares = self.cross.double() * TARGET_RESOLUTION, self.squares.double() * TARGET_RESOLUTION**2
        matrix[1:] *= RESOLUTION
        matrix[:, 1:] *= RESOLUTION
        cross[1:] *= RESOLUTION
        return matrix, cross, squares


def moments(features: np.ndarray, targets: Tensor, device: torch.device | str = "cpu") -> Moments:
    """The sums of features float32 [N, D] and targets [N, T]."""
    width, outputs = features.shape[1] + 1, targets.shape[1]
    products = torch.zeros(width, width, dtype=torch.int64, device=device)
    cross = torch.zeros(width, outputs, dtype=torch.int64, device=device)
    squares = torch.zeros(outputs, dtype=torch.int64, device=device)
    for start in range(0, len(features), PIECE):
        rows = whole_features(torch.from_numpy(np.array(features[start : start + PIECE])).to(device))
        rows = torch.cat([torch.ones_like(rows[:, :1]), rows], 1)
        goals = _whole(targets[start : start + PIECE].to(device), TARGET_RESOLUTION, LIMIT_OF_TARGETS)
        # float64 holds these whole numbers exactly, and is fast
        products += (rows.T @ rows).long()
        cross += (rows.T @ goals).long()
        squares += goals.square().sum(0).long()
    return Moments(upper(products).cpu(), cross.cpu(), squares.cpu())


def sums_and_products(features: np.ndarray, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Sums int64 [D] and the upper triangle of the products int64 [D (D + 1) / 2] of features [N, D]."""
    products = moments(features, torch.zeros(len(features), 0), device).products
    width = features.shape[1]
    return products[1 : width + 1], products[width + 1 :]


def sums_and_squares(features: np.ndarray, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Sums int64 [D] of features [N, D], and of their squares, int64 [D]."""
    rows = whole_features(torch.from_numpy(np.array(features)).to(device)).long().cpu()
    return rows.sum(0), rows.square().sum(0)


def check_count(images: int) -> None:
    """WorkFailed where sums of so many images could overflow."""
    if images > MOST_IMAGES:
        raise WorkFailed(f"sums of more than {MOST_IMAGES:,} images can overflow; leave out some sites")


def whole_features(features: Tensor) -> Tensor:
    """Features as whole numbers of RESOLUTION, in float64."""
    return _whole(features, RESOLUTION, LIMIT)


def _whole(values: Tensor, resolution: float, limit: float) -> Tensor:
    return (values.double().clamp(-limit, limit) / resolution).round()


def upper(matrix: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix, row by row."""
    row, column = torch.triu_indices(*matrix.shape, device=matrix.device)
    return matrix[row, column]


def full(triangle: Tensor, width: int) -> Tensor:
    """The symmetric matrix of an upper triangle."""
    matrix = triangle.new_zeros(width, width)
    row, column = torch.triu_indices(width, width)
    matrix[row, column] = triangle
    matrix[column, row] = triangle
    return matrix


def checked(tensors: Mapping[str, Tensor], site: str, width: int, outputs: int, most: int = MOST_IMAGES) -> Moments:
    """What a site sent as moments of at most so many images; WorkFailed where it is something else."""
    wanted = {
        "products": ((width + 1) * (width + 2) // 2,),
        "cross": (width + 1, outputs),
        "squares": (outputs,),
    }
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor.dtype == torch.int64}
    if found != wanted or len(tensors) != len(wanted):
        raise WorkFailed(f"site '{site}' sent sums of another form than {wanted}; it must run the same study")
    sums = Moments(tensors["products"], tensors["cross"], tensors["squares"])
    if not 0 < sums.count <= most:
        raise WorkFailed(
            f"site '{site}' says that its sums are of {sums.count} images, and the limit is {most:,}; leave it out"
        )
    if not _possible(sums):
        raise WorkFailed(f"site '{site}' sent sums that no {sums.count} images have; leave it out")
    return sums


def _possible(sums: Moments) -> bool:
    """Whether squares are those of numbers within the limits, and products no larger than squares allow (Cauchy)."""
    matrix = full(sums.products, sums.width + 1).double()
    features, targets = matrix.diag(), sums.squares.double()
    for squares, limit in ((features[1:], LIMIT / RESOLUTION), (targets, LIMIT_OF_TARGETS / TARGET_RESOLUTION)):
        if not bool(((squares >= 0) & (squares <= sums.count * limit**2)).all()):
            return False
    return _below(matrix, features, features) and _below(sums.cross.double(), features, targets)


def _below(products: Tensor, first: Tensor, second: Tensor) -> bool:
    return bool((products.abs() <= torch.outer(first.sqrt(), second.sqrt()) * SLACK).all())
