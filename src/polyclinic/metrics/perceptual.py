"""Perceptual distance, offline: how far two images are for a network that has seen a million photographs.

The default, EffLite0, needs an installable package and nothing else; LPIPS proper needs `polyclinic weights get`.
Either is the squared Euclidean distance of two vectors (`embed`), so that nearest neighbours among thousands of images
are found by matrix products, exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.errors import BadInput
from polyclinic.metrics.images import Images, as_unit, orientations_of, same_shape, turned
from polyclinic.metrics.networks.efficientnet import efficientnet_lite0
from polyclinic.metrics.networks.weights import Name, find, read_lpips
from polyclinic.settings import no_such_choice

DEFAULT = "efficientnet-lite0"
NAMES = (DEFAULT, *get_args(Name))
SMALLEST = 64  # px; pooling leaves nothing of smaller images, and AlexNet cannot take them at all
EPS = 1e-10  # as LPIPS has it
AT_ONCE = 64  # images in a network


class PerceptualDistance(nn.Module):
    """Mean over pixels of the weighted squared difference of feature vectors of length one, summed over levels.

    `name` says which features these are, and goes into every result. Images of less than 64 px are enlarged to 64
    (bilinear), grey ones get three equal channels; both make values that are not comparable with published ones.
    """

    def __init__(self, network: nn.Module, weights: Sequence[Tensor] | None = None) -> None:
        """`network.levels` takes images [N, 3, H, W] in [0, 1] to a list of feature maps [N, C_l, H_l, W_l].

        `weights`: for each level [C_l]; without, all channels weigh the same and levels are averaged."""
        super().__init__()
        self.network = network
        self.name: str = network.name  # type: ignore[assignment]
        self.count = 0 if weights is None else len(weights)
        for level, values in enumerate(weights or ()):
            if bool((values < 0).any()):
                raise BadInput(f"perceptual distance: weights of level {level} are negative; get {self.name} again")
            self.register_buffer(f"root{level}", values.sqrt()[:, None, None])

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """[N] from images [N, C, H, W] in [0, 1]; can be differentiated with respect to both."""
        return (self.embed(first) - self.embed(second)).square().sum(1)

    def embed(self, images: Tensor) -> Tensor:
        """Vectors [N, D] whose squared Euclidean distances are the perceptual ones."""
        found = []
        for level, maps in enumerate(self.network.levels(prepare_images(images))):  # type: ignore[operator]
            unit = maps / (torch.linalg.vector_norm(maps, dim=1, keepdim=True) + EPS)
            root = self.get_buffer(f"root{level}") if self.count else 5**-0.5  # the mean over five levels
            found.append((unit * root / (maps.shape[-1] * maps.shape[-2]) ** 0.5).flatten(1))
        return torch.cat(found, 1)


class Pixels(nn.Module):
    """The plain alternative: images averaged down to at most 32 px, and the mean squared error between them."""

    name = "pixels"

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.size = size

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """[N] from images [N, C, H, W]."""
        return (self.embed(first) - self.embed(second)).square().sum(1)

    def embed(self, images: Tensor) -> Tensor:
        small = F.adaptive_avg_pool2d(images, self.size) if min(images.shape[-2:]) > self.size else images
        flat = small.flatten(1)
        return flat / flat.shape[1] ** 0.5


Distance = PerceptualDistance | Pixels


def perceptual_distance(
    name: str = DEFAULT, *, weights: str | Path | None = None, device: str | torch.device = "cpu"
) -> PerceptualDistance:
    """`efficientnet-lite0` (from a package), `lpips-alex` or `lpips-vgg` (fetched before, or a file in `weights`)."""
    if name not in NAMES:
        raise BadInput(f"perceptual distance: {no_such_choice(name, list(NAMES))}")
    if name == DEFAULT:
        return PerceptualDistance(efficientnet_lite0()).to(device).eval()
    network, per_channel = read_lpips(name, Path(weights) if weights else find(name))
    return PerceptualDistance(network, per_channel).to(device).eval()


def prepare_images(images: Tensor) -> Tensor:
    """Images as a network of photographs takes them: three channels, and sides of at least 64 px."""
    if images.dim() != 4 or images.shape[1] not in (1, 3):
        raise BadInput(f"perceptual distance: images have shape {tuple(images.shape)}; give one or three channels")
    colour = images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images
    small = min(images.shape[-2:])
    if small >= SMALLEST:
        return colour
    size = [round(side * SMALLEST / small) for side in images.shape[-2:]]
    return F.interpolate(colour, size=size, mode="bilinear", align_corners=False)


@torch.no_grad()
def embed_all(images: Images, distance: Distance, *, device: str | torch.device = "cpu") -> Tensor:
    """The vectors [N, D] of many images, on the CPU."""
    unit = as_unit(images)
    return torch.cat([distance.embed(some.to(device)).cpu() for some in unit.split(AT_ONCE)])


# --- nearest neighbours ---------------------------------------------------------------------------------------


ROWS = 512  # of a table of distances that is computed at a time


@dataclass(frozen=True)
class Table:
    """Distances [N, M] of each of N images to each of M, and the orientation [N, M] (int8) of the first that is meant:
    the one in which they are closest."""

    distances: Tensor
    orientation: Tensor
    features: str

    def split(self, rows: Sequence[int], columns: Sequence[int]) -> "list[list[Table]]":
        """The parts of so many consecutive rows and columns each."""
        down, across = list(rows), list(columns)
        parts = [[row.split(across, 1) for row in whole.split(down)] for whole in (self.distances, self.orientation)]
        return [[Table(d, o, self.features) for d, o in zip(*pair, strict=True)] for pair in zip(*parts, strict=True)]


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
    """Nearest neighbours of N images, [N] each: the distance, which image it is, in which orientation of the first, and
    the distance divided by that to the second nearest (NaN where there is only one)."""

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
