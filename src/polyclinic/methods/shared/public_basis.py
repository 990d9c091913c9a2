"""A public basis for features: principal components of phantoms' features, which say nothing about any patient."""

import contextlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from polyclinic.data.datasets import SOURCES
from polyclinic.errors import BadInput
from polyclinic.files import cache_folder, make_folder
from polyclinic.models.encoders import Encoder, kept_features

#: drawn pictures whose features the basis is made of
PHANTOMS = ("hand-phantom", "chest-phantom", "fundus-phantom", "brain-phantom")
SIZE = 64
#: a share of the largest variance that is added to all, so that directions of next to none are not blown up
FLOOR = 0.01
#: how much of a basis may be outside of another one, and how far a direction may be stretched, to be the same one
NEAR, STRETCH = 0.1, 1.25


def public_basis(encoder: Encoder, numbers: int, *, whitening: float, each: int) -> dict[str, Tensor]:
    """`mean` [D] and `matrix` [D, k], float32: (x - mean) @ matrix are `numbers` numbers of an image, or fewer where
    phantoms have no more directions. `whitening` 0 leaves the variances of directions as they are, 1 makes them alike.
    The median length of a phantom's vector is 1. `each`: how many phantoms of each kind."""
    folder = cache_folder() / "phantoms"  # their features are the same in every study
    with contextlib.suppress(BadInput):  # computed anew where nothing can be written
        make_folder(folder)
    features = np.concatenate([kept_features(encoder, pictures(name, each), folder) for name in PHANTOMS])
    return basis_of(torch.from_numpy(features).double(), numbers, whitening)


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


def is_same_basis(came: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> bool:
    """True where a basis that came is the one that was computed here, up to a rotation: machines round differently, and
    so turn directions of nearly the same variance. Clipping and noise are the same for any rotation."""
    if not {"mean", "matrix"} <= came.keys() or came["mean"].shape != own["mean"].shape or came["matrix"].dim() != 2:
        return False
    matrix, known = came["matrix"].double(), own["matrix"].double()
    width, most = known.shape[1], max(1, known.shape[1] // 50)
    if matrix.shape[0] != known.shape[0] or abs(matrix.shape[1] - width) > most:
        return False
    turn = torch.linalg.pinv(known) @ matrix
    stretch = torch.linalg.svdvals(turn)
    left = (matrix - known @ turn).norm() / matrix.norm().clamp(min=1e-30)
    apart = (came["mean"].double() - own["mean"].double()).norm() / own["mean"].double().norm()
    kept = stretch[: min(matrix.shape[1], width) - (matrix.shape[1] != width)]
    return bool(left < NEAR and apart < NEAR and stretch.max() < STRETCH and kept.min() > 1 / STRETCH)


def pictures(name: str, count: int, size: int = SIZE) -> np.ndarray:
    """Phantoms of one kind, uint8 [count, C, size, size]."""
    source = SOURCES[name].model_validate({"source": name, "samples": count, "size": size})
    return source.load_shared().images
