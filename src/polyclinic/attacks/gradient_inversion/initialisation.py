"""Initial images and labels of a search, drawn for each target on its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Scheme = Literal["uniform", "transformed-gaussian", "normal", "given"]
#: what is scaled to [0, 1] at once: an image, or each of its channels
Scaling = Literal["image", "channel"]


def scaled_to_unit(values: Tensor) -> Tensor:
    """Values moved and stretched so that the smallest is 0 and the largest 1."""
    low, high = values.min(), values.max()
    return (values - low) / (high - low) if high > low else torch.full_like(values, 0.5)


def uniform(shape: tuple[int, ...], rng: torch.Generator, scaling: Scaling = "image") -> Tensor:
    """U(0, 1), scaled to [0, 1]."""
    return _scale(torch.rand(shape, generator=rng), scaling)


def transformed_gaussian(shape: tuple[int, ...], rng: torch.Generator, scaling: Scaling = "image") -> Tensor:
    """N(0, 1), scaled to [0, 1]."""
    return _scale(torch.randn(shape, generator=rng), scaling)


def normal(shape: tuple[int, ...], rng: torch.Generator, scaling: Scaling = "image") -> Tensor:
    """N(0, 1) as it is (DLG): nothing is scaled."""
    return torch.randn(shape, generator=rng)


def _scale(values: Tensor, scaling: Scaling) -> Tensor:
    """Images [C, H, W] by image or by channel; labels have no channels."""
    if scaling == "image" or values.dim() < 3:
        return scaled_to_unit(values)
    return torch.stack([scaled_to_unit(channel) for channel in values])


SCHEMES: dict[str, Callable[[tuple[int, ...], torch.Generator, Scaling], Tensor]] = {
    "uniform": uniform,
    "transformed-gaussian": transformed_gaussian,
    "normal": normal,
}


def draw(scheme: str, count: int, shape: tuple[int, ...], rng: torch.Generator, scaling: Scaling = "image") -> Tensor:
    """[count, *shape]: images, or the labels of images, each scaled by itself (images by channel if asked for)."""
    return torch.stack([SCHEMES[scheme](shape, rng, scaling) for _ in range(count)])
