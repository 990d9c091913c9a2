"""Gradient distances (Euclidean, Gaussian, SAPAG, cosine), and the total variation of images.

A distance is built once from the observed gradients, a list with a tensor [N, n_i] for each layer (a weight and a bias
count as two), and then maps simulated gradients of the same shapes to [N]. N targets never mix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

Distance = Callable[[Sequence[Tensor]], Tensor]
#: observed gradients to a distance from them
DistanceFrom = Callable[[Sequence[Tensor]], Distance]
#: of a Gaussian distance: one exponential for each layer, or one for the gradients of all layers together
Kernel = Literal["per-layer", "whole-gradient"]


class _SquaredDistance(torch.autograd.Function):
    """Sum of (a - b)² over the last dimension; few passes over memory, where autograd's own takes five each way."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        difference = a - b
        ctx.save_for_backward(difference)
        return torch.linalg.vector_norm(difference, dim=1).square()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (difference,) = ctx.saved_tensors  # in place: these are the largest tensors of all
        return difference.mul_(2 * gradients[0][:, None]), None


def squared_distance(a: Tensor, b: Tensor) -> Tensor:
    """[N] from a [N, n] and b [N, n], of which `a` may be differentiated once."""
    return _SquaredDistance.apply(a, b)


def euclidean(observed: Sequence[Tensor]) -> Distance:
    """DLG: the squared Euclidean distance over all layers."""

    def distance(simulated: Sequence[Tensor]) -> Tensor:
        return sum_of(squared_distance(s, o) for s, o in zip(simulated, observed, strict=True))

    return distance


def gaussian(
    observed: Sequence[Tensor],
    variance: float | Tensor | str = "n-var",
    *,
    kernel: Kernel = "per-layer",
    factor: float = 1.0,
    scaled: bool = True,
    weighted: bool = True,
) -> Distance:
    """Sum over layers i = 1, 2, ... of Q_i (1 - exp(-D_i / lambda²)), Q_i = 1/i (or 1, unless `weighted`).

    `variance` is lambda²: a number (or one for each target, [N]), "var" (the variance of the layer's gradients, SAPAG),
    or "n-var" (n times it, the adaptive Gaussian), the last two multiplied by `factor`. With a number, the sum is
    multiplied by it (unless not `scaled`): the minimum is the same, but the plain form is so flat that L-BFGS stops at
    its tolerances far from it.

    `kernel` "whole-gradient" takes the gradients of all layers for one layer: 1 - exp(-sum of D_i / lambda²).
    """
    layers = observed if kernel == "per-layer" else [torch.cat(tuple(observed), 1)]
    spreads = [_lambda_squared(layer, variance, factor) for layer in layers]
    height = spreads[0] if scaled and not isinstance(variance, str) else 1.0

    def distance(simulated: Sequence[Tensor]) -> Tensor:
        squares = [squared_distance(s, o) for s, o in zip(simulated, observed, strict=True)]
        squares = squares if kernel == "per-layer" else [sum_of(squares)]
        terms = []
        for i, (square, spread) in enumerate(zip(squares, spreads, strict=True)):
            weight = height / (i + 1) if weighted else height
            terms.append(-weight * torch.expm1(-square / spread))
        return sum_of(terms)

    return distance


def _lambda_squared(layer: Tensor, variance: float | Tensor | str, factor: float) -> Tensor:
    """[N]; 1 where a layer's gradients are all alike (pruned away, or only one)."""
    if not isinstance(variance, str):
        return torch.as_tensor(variance).to(layer).expand(len(layer))
    count = layer.shape[1]
    spread = layer.var(1) if count > 1 else torch.zeros_like(layer[:, 0])
    spread = spread * factor * count if variance == "n-var" else spread * factor
    return torch.where(spread > 0, spread, 1.0)


def cosine(observed: Sequence[Tensor]) -> Distance:
    """Geiping et al.: one minus the cosine of the angle between the gradients of all layers together."""
    tiny = torch.finfo(observed[0].dtype).tiny
    length = sum_of(_dot(o, o) for o in observed).clamp(min=tiny).sqrt()

    def distance(simulated: Sequence[Tensor]) -> Tensor:
        along = sum_of(_dot(s, o) for s, o in zip(simulated, observed, strict=True))
        own = sum_of(_dot(s, s) for s in simulated).clamp(min=tiny).sqrt()
        return 1 - along / (own * length)

    return distance


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1)


#: Gaussian distances whose lambda² follows from the gradients that were sent
ADAPTED = {"sapag": "var", "adaptive-gaussian": "n-var"}
DISTANCES: dict[str, DistanceFrom] = {
    "euclidean": euclidean,
    **{name: partial(gaussian, variance=spread) for name, spread in ADAPTED.items()},
    "cosine": cosine,
}


def total_variation(images: Tensor) -> Tensor:
    """[N] from images [N, B, C, H, W]: the mean step between neighbouring pixels, down plus across."""
    down = images.diff(dim=-2).abs().flatten(1).mean(1)
    across = images.diff(dim=-1).abs().flatten(1).mean(1)
    return down + across


def sum_of(terms: Any) -> Tensor:
    """The sum of tensors; torch's stubs take Python's `sum` for a number."""
    total = None
    for term in terms:
        total = term if total is None else total + term
    if total is None:
        raise ValueError("a distance needs at least one layer")
    return total
