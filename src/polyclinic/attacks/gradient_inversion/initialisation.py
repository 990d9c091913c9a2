"""Initial images and labels of a search, drawn for each target on its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Scheme = Literal["uniform", "transformed-gaussian", "normal", "given"]


def scaled_to_unit(values: Tensor) -> Tensor:
    """Values moved and stretched so that the smallest is 0 and the largest 1."""
    low, high = values.min(), values.max()
    return (values - low) / (high - low) if high > low else torch.full_like(values, 0.5)


def uniform(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """U(0, 1), scaled to [0, 1]."""
    return scaled_to_unit(torch.rand(shape, generator=rng))


def transformed_gaussian(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """N(0, 1), scaled to [0, 1]."""
    return scaled_to_unit(torch.randn(shape, generator=rng))


def normal(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """N(0, 1) as it is (DLG)."""
    return torch.randn(shape, generator=rng)


SCHEMES: dict[str, Callable[[tuple[int, ...], torch.Generator], Tensor]] = {
    "uniform": uniform,
    "transformed-gaussian": transformed_gaussian,
    "normal": normal,
}


def draw(scheme: str, count: int, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """[count, *shape]: images, or the labels of images, each scaled by itself."""
    return torch.stack([SCHEMES[scheme](shape, rng) for _ in range(count)])
