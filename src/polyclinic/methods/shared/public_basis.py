"""A public basis for features: principal components of phantoms' features, which say nothing about any patient."""

from __future__ import annotations

import contextlib

import numpy as np
import torch
from torch import Tensor

from polyclinic.data.datasets import SOURCES
from polyclinic.encoders import Encoder
from polyclinic.encoders.kept_features import kept_features
from polyclinic.errors import BadInput
from polyclinic.files import cache_folder, make_folder

#: drawn pictures whose features the basis is made of
PHANTOMS = ("hand-phantom", "chest-phantom", "fundus-phantom", "brain-phantom")
SIZE = 64
#: a share of the largest variance that is added to all, so that directions of next to none are not blown up
FLOOR = 0.01


def public_basis(encoder: Encoder, numbers: int, *, whitening: float, each: int) -> dict[str, Tensor]:
    """`mean` [D] and `matrix` [D, k], float32: (x - mean) @ matrix are `numbers` numbers of an image, or fewer where
    phantoms have no more directions. `whitening` 0 leaves the variances of directions as they are, 1 makes them alike.
    The median length of a phantom's vector is 1. `each`: how many phantoms of each kind."""
    features = torch.cat([_features(encoder, name, each) for name in PHANTOMS]).double()
    return basis_of(features, numbers, whitening)


def _features(encoder: Encoder, name: str, each: int) -> Tensor:
    """Features of phantoms, which the user's cache keeps: they are the same in every study."""
    folder = cache_folder() / "phantoms"
    with contextlib.suppress(BadInput):  # computed anew where nothing can be written
        make_folder(folder)
    return torch.from_numpy(np.array(kept_features(encoder, pictures(name, each), folder)))


def basis_of(features: Tensor, numbers: int, whitening: float) -> dict[str, Tensor]:
    """The same from features float64 [N, D]."""
    mean, deviation = features.mean(0), features.std(0).clamp(min=1e-3)
    scaled = (features - mean) / deviation
    # N is smaller than D: the components follow from the products of images, [N, N]
    squares, turned = torch.linalg.eigh(scaled @ scaled.T)
    kept = squares.flip(0)[:numbers] > 1e-9 * squares[-1]
    squares, turned = squares.flip(0)[:numbers][kept], turned.flip(1)[:, :numbers][:, kept]
    directions = scaled.T @ turned / squares.sqrt()
    variances = squares / len(features)
    matrix = directions * (variances + FLOOR * variances[0]).pow(-whitening / 2)
    lengths = (scaled @ matrix).norm(dim=1)
    matrix = matrix / deviation[:, None] / lengths.median()
    return {"mean": mean.float(), "matrix": matrix.float()}


def pictures(name: str, count: int, size: int = SIZE) -> np.ndarray:
    """Phantoms of one kind, uint8 [count, C, size, size]."""
    source = SOURCES[name].model_validate({"source": name, "samples": count, "size": size})
    return source.load().images
