"""Distances between sets of images: Fréchet distance (FID), KID, precision, recall, density and coverage.

Figures are named by their features (FD-EffLite0, KID-EffLite0), because values with other features cannot be compared;
with FID's own network (`inception_features`) they are FID and KID.
They stand beside a floor: the same figure between two sets of real images of the same size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from polyclinic.errors import BadInput
from polyclinic.metrics.images import Images, as_unit, same_shape
from polyclinic.metrics.networks import inception
from polyclinic.metrics.networks.efficientnet import EfficientNetLite0Features, efficientnet_lite0
from polyclinic.metrics.networks.inception import FIDInception
from polyclinic.metrics.networks.weights import find
from polyclinic.randomness import torch_rng

SIDE = 128  # px, at which features are taken: a fixed size, as the figures depend on it
AT_ONCE = 32  # images in a network
ROWS = 512  # of a matrix of distances at a time
NEIGHBOURS = 5  # as in Naeem et al. 2020
SUBSETS = 50  # pairs of halves, of which the deviation of KID is taken
FEWEST = 10  # images of a set: of fewer these figures say nothing


@dataclass(frozen=True)
class Extractor:
    """Images to feature vectors [N, D], float64. `network` takes images [N, 3, side, side] in [0, 1]; `name` goes into
    the name of every figure made with it."""

    network: Callable[[Tensor], Tensor]
    name: str
    side: int = SIDE
    antialias: bool = True
    device: str | torch.device = "cpu"

    @property
    def figure(self) -> str:
        """The name of the Fréchet distance with these features: FID only where it is that."""
        return "FID" if self.name == FIDInception.name else "FD"

    @torch.no_grad()
    def __call__(self, images: Images) -> Tensor:
        found, size = [], (self.side, self.side)
        for some in as_unit(images).split(AT_ONCE):
            colour = some.to(self.device).expand(-1, 3, -1, -1)
            sized = F.interpolate(colour, size=size, mode="bilinear", antialias=self.antialias, align_corners=False)
            found.append(self.network(sized).cpu())
        return torch.cat(found).double()


def efficientnet_features(*, side: int = SIDE, device: str | torch.device = "cpu") -> Extractor:
    """The features that EfficientNet-Lite0's classifier sees, 1,280 numbers an image."""
    network: EfficientNetLite0Features = efficientnet_lite0(device)
    return Extractor(network.vector, network.name, side=side, device=device)


def inception_features(weights: str | Path | None = None, *, device: str | torch.device = "cpu") -> Extractor:
    """FID's features, 2,048 numbers an image: from `polyclinic weights get inception-fid`, or of a file."""
    network = inception.fid_inception(Path(weights) if weights else find(inception.NAME), device)
    return Extractor(network, network.name, side=inception.SIDE, antialias=False, device=device)


# --- figures of vectors ---------------------------------------------------------------------------------


def frechet_distance(first: Tensor, second: Tensor) -> float:
    """Between two sets of vectors [N, D] and [M, D], taken for Gaussian clouds. Depends on N and M: fewer, larger.

    The trace of the root of the covariances' product is the nuclear norm of the product of the centred sets, which
    needs no matrix root, and no more images than there are.
    """
    shift, spread, roots = (first.mean(0) - second.mean(0)).square().sum(), [], []
    for vectors in (first.double(), second.double()):
        centred = (vectors - vectors.mean(0)) / (len(vectors) - 1) ** 0.5  # X.T @ X is the sample covariance
        spread.append(centred.square().sum())
        # at most D rows with the same X.T @ X
        roots.append(torch.linalg.qr(centred, mode="r").R if len(centred) > centred.shape[1] else centred)
    cross = torch.linalg.svdvals(roots[0] @ roots[1].T).sum()
    return max(0.0, float(shift + spread[0] + spread[1] - 2 * cross))


def kernel_distance(first: Tensor, second: Tensor) -> float:
    """KID: the unbiased estimate of the squared maximum mean discrepancy, cubic kernel. May be slightly negative."""

    def kernel(one: Tensor, other: Tensor) -> Tensor:
        return (one @ other.T / one.shape[1] + 1) ** 3

    a, b = first.double(), second.double()
    # means without the diagonal, where a vector meets itself
    within = [(k.sum() - k.trace()) / (len(k) * (len(k) - 1)) for k in (kernel(a, a), kernel(b, b))]
    return float(within[0] + within[1] - 2 * kernel(a, b).mean())


def kernel_distance_deviation(first: Tensor, second: Tensor, rng: torch.Generator) -> float:
    """Standard deviation of KID over pairs of random halves of both sets: an upper estimate of its own deviation."""

    def half(vectors: Tensor) -> Tensor:
        return vectors[torch.randperm(len(vectors), generator=rng)[: max(2, len(vectors) // 2)]]

    return float(np.std([kernel_distance(half(first), half(second)) for _ in range(SUBSETS)], ddof=1))


def precision_recall(real: Tensor, made: Tensor, neighbours: int = NEIGHBOURS) -> dict[str, float]:
    """Precision and recall (Kynkäänniemi et al. 2019), density and coverage (Naeem et al. 2020) of features `made`
    [M, D] against `real` [N, D], in float64.

    A ball around each vector reaches to its k-th nearest neighbour of the same set. Precision: the share of made
    vectors in the ball of any real one; density: in how many balls, over k. Recall: the share of real vectors in the
    ball of any made one. Coverage: the share of real vectors with a made one in their ball; unlike recall, outliers
    among made vectors cannot raise it.

    A vector on the edge of a ball is inside (<=): so the paper of Kynkäänniemi et al. defines it (equation 1). Naeem
    et al. write balls and do not say; their program leaves the edge out (<). It matters only where distances are
    equal, for example where an image occurs more often than k times: its ball is a point, and a copy lies in it.
    """
    if min(len(real), len(made)) <= neighbours:
        raise BadInput(f"features: {neighbours} neighbours need more than {neighbours} images in each set; give more")
    real, made = real.double(), made.double()
    made_radius = _radii(made, neighbours)
    balls = torch.zeros(len(made), device=made.device)  # real balls that hold each made vector
    recalled, covered = [], []
    for rows, radius in zip(real.split(ROWS), _radii(real, neighbours).split(ROWS), strict=True):
        away = _distances(rows, made)
        inside = away <= radius[:, None]
        balls += inside.sum(0)
        covered.append(inside.any(1))
        recalled.append((away <= made_radius[None]).any(1))
    return {
        "precision": float((balls > 0).double().mean()), "recall": float(torch.cat(recalled).double().mean()),
        "density": float(balls.double().mean() / neighbours), "coverage": float(torch.cat(covered).double().mean()),
    }  # fmt: skip


def _radii(vectors: Tensor, neighbours: int) -> Tensor:
    """Distance of each vector to its k-th nearest other one, [N]."""
    # the nearest of all is the vector itself
    found = [_distances(rows, vectors).kthvalue(neighbours + 1, 1).values for rows in vectors.split(ROWS)]
    return torch.cat(found)


def _distances(first: Tensor, second: Tensor) -> Tensor:
    """Exactly 0 between equal vectors, which a matrix product does not give."""
    return torch.cdist(first, second, compute_mode="donot_use_mm_for_euclid_dist")


# --- the report -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fidelity:
    """Figures between real and made images, and the same between real and other real images (`floor`)."""

    features: str
    side: int
    images: int  #: in each of the sets that were compared
    made: dict[str, float]
    floor: dict[str, float]

    def summary(self) -> dict[str, float | int | str]:
        """Flat, under names that say which features were used."""
        names = {figure: f"{figure}-{self.features}" for figure in self.made}
        if self.features == FIDInception.name:  # the features with which these have their plain names
            names = {figure: {"FD": "FID"}.get(figure, figure) for figure in self.made}
        named = {names[figure]: value for figure, value in self.made.items()}
        floors = {f"{names[figure]} floor": value for figure, value in self.floor.items()}
        return {**named, **floors, "features": f"{self.features} at {self.side} px", "images": self.images}


def fidelity(
    real: Images, made: Images, extractor: Extractor, *, other_real: Images | None = None, seed: int = 0
) -> Fidelity:
    """Compare made images with real ones, all sets cut to the same size, as these figures depend on it.

    The floor is measured on `other_real` (held-out images); without them `real` is halved at random.
    """
    first, second = as_unit(real, "real images"), as_unit(made, "made images")
    same_shape(first, second, "made images")
    order = torch.randperm(len(first), generator=torch_rng(seed, "fidelity", "halves"))
    if other_real is None:
        first, other = first[order[::2]], first[order[1::2]]
    else:
        other = as_unit(other_real, "other real images")
    count = min(len(first), len(second), len(other))
    if count < FEWEST:
        raise BadInput(f"features: {count} images in the smallest set; give {FEWEST} or more of each")
    draws = [torch.randperm(len(one), generator=torch_rng(seed, "fidelity", "some")) for one in (first, second, other)]
    sets = [extractor(one[drawn[:count]]) for one, drawn in zip((first, second, other), draws, strict=True)]
    rng = torch_rng(seed, "fidelity", "subsets")
    return Fidelity(
        extractor.name,
        extractor.side,
        count,
        made=_figures(sets[0], sets[1], rng),
        floor=_figures(sets[0], sets[2], rng),
    )


def _figures(real: Tensor, made: Tensor, rng: torch.Generator) -> dict[str, float]:
    neighbours = min(NEIGHBOURS, len(real) - 1)
    return {
        "FD": frechet_distance(real, made), "KID": kernel_distance(real, made),
        "KID deviation": kernel_distance_deviation(real, made, rng), **precision_recall(real, made, neighbours),
    }  # fmt: skip
