"""How far a set of made images is from real ones: Fréchet distance, KID, precision, recall, density and coverage.

Called by their features (FD-EffLite0, KID-EffLite0), because values with other features cannot be compared; and always
beside the floor, the same figure between two sets of real images of the same size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from polyclinic.errors import BadInput
from polyclinic.metrics.image_sets import Images, as_unit, same_shape
from polyclinic.metrics.neighbours import squared_distances
from polyclinic.metrics.networks.efficientnet import EfficientNetLite0, efficientnet_lite0
from polyclinic.randomness import torch_rng

SIDE = 128  # px, at which features are taken: a fixed size, as the figures depend on it
AT_ONCE = 32
SUBSETS = 50
FEWEST = 10


class Extractor:
    """Images to feature vectors [N, D], float64. `name` goes into the name of every figure made with it."""

    def __init__(
        self, network: Callable[[Tensor], Tensor], name: str, *, side: int = SIDE, device: str | torch.device = "cpu"
    ) -> None:
        """`network`: images [N, 3, side, side] in [0, 1] to vectors [N, D]."""
        self.network, self.name, self.side, self.device = network, name, side, device

    @torch.no_grad()
    def __call__(self, images: Images) -> Tensor:
        unit = as_unit(images)
        return torch.cat([self._of(some) for some in unit.split(AT_ONCE)]).double()

    def _of(self, images: Tensor) -> Tensor:
        colour = images.to(self.device).expand(-1, 3, -1, -1)
        size = (self.side, self.side)
        sized = F.interpolate(colour, size=size, mode="bilinear", antialias=True, align_corners=False)
        return self.network(sized).cpu()


def efficientnet_features(*, side: int = SIDE, device: str | torch.device = "cpu") -> Extractor:
    """What EfficientNet-Lite0's classifier sees, 1,280 numbers an image."""
    network: EfficientNetLite0 = efficientnet_lite0(device)
    return Extractor(network.vector, network.name, side=side, device=device)


# --- figures of vectors ---------------------------------------------------------------------------------


def frechet_distance(first: Tensor, second: Tensor) -> float:
    """Between two sets of vectors [N, D] and [M, D], taken for Gaussian clouds. Depends on N and M: fewer, larger.

    The trace of the root of the covariances' product is the nuclear norm of the product of the centred sets, which
    needs no matrix root, and no more images than there are.
    """
    a, b = _centred(first), _centred(second)
    shift = (first.mean(0) - second.mean(0)).square().sum()
    cross = torch.linalg.svdvals(_compact(a) @ _compact(b).T).sum()
    return max(0.0, float(shift + a.square().sum() + b.square().sum() - 2 * cross))


def _centred(vectors: Tensor) -> Tensor:
    """So that X.T @ X is the sample covariance."""
    vectors = vectors.double()
    return (vectors - vectors.mean(0)) / (len(vectors) - 1) ** 0.5


def _compact(vectors: Tensor) -> Tensor:
    """At most D rows with the same X.T @ X."""
    return torch.linalg.qr(vectors, mode="r").R if len(vectors) > vectors.shape[1] else vectors


def kernel_distance(first: Tensor, second: Tensor) -> float:
    """KID: the unbiased estimate of the squared maximum mean discrepancy, cubic kernel. May be slightly negative."""
    a, b = first.double(), second.double()
    across = _kernel(a, b).mean()
    return float(_mean_off_diagonal(_kernel(a, a)) + _mean_off_diagonal(_kernel(b, b)) - 2 * across)


def _kernel(first: Tensor, second: Tensor) -> Tensor:
    return (first @ second.T / first.shape[1] + 1) ** 3


def _mean_off_diagonal(square: Tensor) -> Tensor:
    count = len(square)
    return (square.sum() - square.trace()) / (count * (count - 1))


def kernel_distance_deviation(first: Tensor, second: Tensor, rng: torch.Generator, subsets: int = SUBSETS) -> float:
    """Standard deviation of KID over pairs of random halves of both sets: an upper estimate of its own deviation."""
    values = [kernel_distance(_half(first, rng), _half(second, rng)) for _ in range(subsets)]
    return float(np.std(values, ddof=1))


def _half(vectors: Tensor, rng: torch.Generator) -> Tensor:
    return vectors[torch.randperm(len(vectors), generator=rng)[: max(2, len(vectors) // 2)]]


def precision_recall(real: Tensor, made: Tensor, neighbours: int = 5) -> dict[str, float]:
    """Precision and recall (Kynkäänniemi et al. 2019), density and coverage (Naeem et al. 2020).

    A set's region is the union of balls around its vectors, each reaching to the `neighbours`-th nearest of its set.
    """
    if min(len(real), len(made)) <= neighbours:
        raise BadInput(f"features: {neighbours} neighbours need more than {neighbours} images in each set; give more")
    real, made = real.double(), made.double()
    across = squared_distances(real, made)
    real_radius, made_radius = _radius(real, neighbours), _radius(made, neighbours)
    inside_real = across <= real_radius[:, None]
    return {
        "precision": float(inside_real.any(0).double().mean()),
        "recall": float((across <= made_radius[None]).any(1).double().mean()),
        "density": float(inside_real.double().sum(0).mean() / neighbours),
        "coverage": float(inside_real.any(1).double().mean()),
    }


def _radius(vectors: Tensor, neighbours: int) -> Tensor:
    """Squared distance of each vector to its `neighbours`-th nearest other one."""
    own = squared_distances(vectors, vectors).fill_diagonal_(torch.inf)
    return own.kthvalue(neighbours, dim=1).values


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
        named = {f"{_named(key, self.features)}": value for key, value in self.made.items()}
        floors = {f"{_named(key, self.features)} floor": value for key, value in self.floor.items()}
        return {**named, **floors, "features": f"{self.features} at {self.side} px", "images": self.images}


def _named(figure: str, features: str) -> str:
    return f"{figure}-{features}"


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
    sets = [extractor(_some(images, count, seed)) for images in (first, second, other)]
    rng = torch_rng(seed, "fidelity", "subsets")
    return Fidelity(
        extractor.name,
        extractor.side,
        count,
        made=_figures(sets[0], sets[1], rng),
        floor=_figures(sets[0], sets[2], rng),
    )


def _some(images: Tensor, count: int, seed: int) -> Tensor:
    return images[torch.randperm(len(images), generator=torch_rng(seed, "fidelity", "some"))[:count]]


def _figures(real: Tensor, made: Tensor, rng: torch.Generator) -> dict[str, float]:
    neighbours = min(5, len(real) - 1)
    return {
        "FD": frechet_distance(real, made),
        "KID": kernel_distance(real, made),
        "KID deviation": kernel_distance_deviation(real, made, rng),
        **precision_recall(real, made, neighbours),
    }
