"""Perceptual distance, offline: how far two images are for a network that has seen a million photographs.

The default, EffLite0, needs an installable package and nothing else; LPIPS proper needs `polyclinic weights get`.
Either is the squared Euclidean distance of two vectors (`embed`), so that nearest neighbours among thousands of images
are found by matrix products, exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.errors import BadInput
from polyclinic.metrics.image_sets import Images, as_unit
from polyclinic.metrics.networks import lpips
from polyclinic.metrics.networks.efficientnet import efficientnet_lite0
from polyclinic.metrics.networks.weights import Name, find
from polyclinic.settings import nearest

DEFAULT = "efficientnet-lite0"
NAMES = (DEFAULT, *get_args(Name))
SMALLEST = 64  # px; pooling leaves nothing of smaller images, and AlexNet cannot take them at all
EPS = 1e-10
AT_ONCE = 64


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
        levels = self.network.levels(prepare_images(images))  # type: ignore[operator]
        return torch.cat([self._flat(level, maps) for level, maps in enumerate(levels)], 1)

    def _flat(self, level: int, maps: Tensor) -> Tensor:
        unit = maps / (torch.linalg.vector_norm(maps, dim=1, keepdim=True) + EPS)
        root = self.get_buffer(f"root{level}") if self.count else self._equal
        return (unit * root / (maps.shape[-1] * maps.shape[-2]) ** 0.5).flatten(1)

    @property
    def _equal(self) -> float:
        return 5**-0.5  # the mean over five levels


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
        raise BadInput(f"perceptual distance: no such choice: '{name}'{nearest(name, list(NAMES))}; {_choices()}")
    if name == DEFAULT:
        return PerceptualDistance(efficientnet_lite0()).to(device).eval()
    network, per_channel = lpips.read(name, Path(weights) if weights else find(name))
    return PerceptualDistance(network, per_channel).to(device).eval()


def _choices() -> str:
    return f"choose one of {', '.join(NAMES)}"


def prepare_images(images: Tensor) -> Tensor:
    """What a network of photographs takes: three channels, and sides of at least 64 px."""
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
