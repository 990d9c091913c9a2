"""Nearest neighbours between two sets of images, by any distance that is Euclidean in some vector, exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyclinic.metrics.image_sets import Images, as_unit, orientations_of, same_shape, turned
from polyclinic.metrics.perceptual import Distance, embed_all

ROWS = 512  # of a table of distances that is computed at a time


@dataclass(frozen=True)
class Table:
    """Distances [N, M] of each of N images to each of M, and the orientation [N, M] (int8) of the first that is meant:
    the one in which they are closest."""

    distances: Tensor
    orientation: Tensor
    features: str

    def split(self, rows: Sequence[int], columns: Sequence[int]) -> list[list[Table]]:
        """The parts of so many consecutive rows and columns each."""
        pieces = zip(self.distances.split(list(rows)), self.orientation.split(list(rows)), strict=True)
        return [
            [
                Table(distances, orientation, self.features)
                for distances, orientation in zip(d.split(list(columns), 1), o.split(list(columns), 1), strict=True)
            ]
            for d, o in pieces
        ]


def squared_distances(first: Tensor, second: Tensor) -> Tensor:
    """[N, M] from vectors [N, D] and [M, D]. Differences below about 1e-6 of the vectors' lengths are lost."""
    lengths = first.square().sum(1)[:, None] + second.square().sum(1)[None]
    return (lengths - 2 * first @ second.T).clamp_(min=0)


def table(
    images: Images, others: Images, distance: Distance, *, turn: bool = True, device: str | torch.device = "cpu"
) -> Table:
    """All distances between two sets; with `turn` over flips and quarter turns, so that a mirrored copy is near."""
    first, second = as_unit(images), as_unit(others, "other images")
    same_shape(first, second, "other images")
    references = embed_all(second, distance, device=device).to(device)
    best = torch.full((len(first), len(second)), torch.inf)
    which = torch.zeros(best.shape, dtype=torch.int8)
    for orientation in orientations_of(first) if turn else (0,):
        for rows in torch.arange(len(first)).split(ROWS):
            vectors = embed_all(turned(first[rows], orientation), distance, device=device).to(device)
            found = squared_distances(vectors, references).cpu()
            which[rows] = torch.where(found < best[rows], orientation, which[rows].long()).to(torch.int8)
            best[rows] = torch.minimum(best[rows], found)
    return Table(best, which, distance.name)


@dataclass(frozen=True)
class Nearest:
    """Of each of N images, [N] each: the distance to its nearest neighbour, which one it is, in which orientation of
    the image, and the distance divided by that to the second nearest (NaN where there is only one)."""

    distance: Tensor
    index: Tensor
    orientation: Tensor
    ratio: Tensor
    features: str


def nearest_of(found: Table) -> Nearest:
    """The nearest neighbour of each row. 0 / 0 is a ratio of 1: as near to two images, which proves nothing."""
    two = min(2, found.distances.shape[1])
    values, index = found.distances.topk(two, dim=1, largest=False)
    first, second = values[:, 0], values[:, -1]
    ratio = torch.where(second > 0, first / second, 1.0) if two == 2 else torch.full_like(first, torch.nan)
    orientation = found.orientation.gather(1, index[:, :1])[:, 0].long()
    return Nearest(first, index[:, 0], orientation, ratio, found.features)


def nearest(
    images: Images, others: Images, distance: Distance, *, turn: bool = True, device: str | torch.device = "cpu"
) -> Nearest:
    """The nearest of `others` for each of `images`."""
    return nearest_of(table(images, others, distance, turn=turn, device=device))
