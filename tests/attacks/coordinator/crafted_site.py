"""A site that does as it is told: it computes the gradient of its images at the weights that it got."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polyclinic.models import Backbone, build
from polyclinic.randomness import seeded, torch_rng


def pictures(count: int, size: int, seed: int = 0) -> Tensor:
    """Smooth grey images [N, 1, size, size] in [0, 1] of different brightness."""
    rng = torch_rng(seed, "pictures")
    coarse = torch.rand(count, 1, 5, 5, generator=rng)
    images = nn.functional.interpolate(coarse, size, mode="bicubic", align_corners=False).clamp(0, 1)
    return images * (0.4 + 0.6 * torch.rand(count, 1, 1, 1, generator=rng))


def network(backbone: str, size: int, norm: str = "batch", outputs: int = 2) -> Backbone:
    with seeded(0, "network"):
        return build(backbone, channels=1, outputs=outputs, size=size, norm=norm)


def gradient(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """What FedSGD sends."""
    model.train().zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


def trained(model: nn.Module, images: Tensor, labels: Tensor, lr: float = 1e-3, steps: int = 1) -> dict[str, Tensor]:
    """What FedAvg sends: the weights after some steps over all images."""
    optimizer = torch.optim.SGD(model.train().parameters(), lr)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}
