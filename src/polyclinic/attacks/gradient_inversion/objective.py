"""Gradient distances (Euclidean, Gaussian, SAPAG, cosine), and the total variation of images.

A distance is built once from the observed gradients, a list with a tensor [N, n_i] for each layer (a weight and a bias
count as two), and then maps simulated gradients of the same shapes to [N]. N targets never mix.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from polyclinic.attacks.gradient_inversion.priors import Prior
from polyclinic.attacks.gradient_inversion.simulation import Simulation

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
) -> Distance:
    """Sum over layers i = 1, 2, ... of Q_i (1 - exp(-D_i / lambda²)), Q_i = 1/i.

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
        pairs = enumerate(zip(squares, spreads, strict=True), 1)
        return sum_of(-(height / i) * torch.expm1(-square / spread) for i, (square, spread) in pairs)

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


#: what labels are: probabilities of classes, plain numbers, or masks between 0 and 1
LabelForm = Literal["classes", "values", "masks"]


@dataclass(frozen=True)
class FreeLabels:
    """Labels that are searched for together with the images, `shape` per image; classes and masks as logits."""

    shape: tuple[int, ...]
    form: LabelForm = "classes"

    def from_point(self, values: Tensor) -> Tensor:
        return {"classes": lambda: values.softmax(-1), "masks": values.sigmoid, "values": lambda: values}[self.form]()


@dataclass(frozen=True)
class FixedLabels:
    """Labels that are known or were read off the gradients: [N, B, ...], as the loss takes them."""

    values: Tensor


class Objective:
    """`objective(point [N, D])` gives the loss [N] and its gradient [N, D].

    A point holds one target per row: its images [B, C, H, W], then its free labels, flattened. Joined, one point [1, D]
    must explain what was sent in each of N rounds.
    """

    joined = False

    def __init__(
        self,
        simulation: Simulation,
        observed: Mapping[str, Tensor],
        labels: FreeLabels | FixedLabels,
        *,
        image_shape: tuple[int, int, int, int],
        distance: DistanceFrom = euclidean,
        smoothness: float = 0.0,
        priors: Sequence[tuple[float, Prior]] = (),
        scale: int = 1,
    ) -> None:
        """`observed`: what the sites sent, [N, ...] by name. `smoothness`: weight of the total variation. `priors`:
        each with its weight. `scale`: sides of the images that are searched for are so many times smaller."""
        self.simulation = simulation
        self.observed = {name: observed[name] for name in simulation.names}
        self.labels = labels
        self.image_shape = image_shape
        self.smoothness = smoothness
        self.priors, self.scale = tuple(priors), scale
        self._distance_from = distance
        self._distance: Distance = distance([tensor.flatten(1) for tensor in self.observed.values()])

    def of_one_point(self) -> Objective:
        """The same of rounds of the same images, whose labels are those of the first."""
        found = copy.copy(self)
        found.joined = True
        if isinstance(self.labels, FixedLabels):
            found.labels = FixedLabels(self.labels.values[:1].expand_as(self.labels.values))
        return found

    def __call__(self, point: Tensor) -> tuple[Tensor, Tensor]:
        if self.joined:
            point = point.expand(len(next(iter(self.observed.values()))), -1)
        point = point.detach().requires_grad_()
        images, labels = self._unpack(point)
        sent = self.simulation.of_targets(images, labels)
        loss = self._distance([sent[name].flatten(1) for name in self.observed])
        loss = loss + self.penalty(images)
        (gradient,) = torch.autograd.grad(loss.sum(), point)  # no target's loss depends on another's row
        if self.joined:
            return loss.detach().mean(0, keepdim=True), gradient.mean(0, keepdim=True)
        return loss.detach(), gradient

    def penalty(self, images: Tensor) -> Tensor:
        """What is added to the distance [N], whatever was sent: roughness, and priors, of images [N, B, C, H, W]."""
        found = self.smoothness * total_variation(images) if self.smoothness else images.new_zeros(len(images))
        for weight, prior in self.priors:
            found = found + weight * prior(images)
        return found

    def unpack(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Images [N, B, C, H, W] and labels [N, B, ...] of a point [N, D]."""
        images, labels = self._unpack(point)
        return images, labels[: len(images)]

    def _unpack(self, point: Tensor) -> tuple[Tensor, Tensor]:
        size = math.prod(self.point_shape)
        images = enlarge(point[:, :size].reshape(-1, *self.point_shape), self.image_shape)
        if isinstance(self.labels, FixedLabels):
            return images, self.labels.values
        free = point[:, size:].reshape(-1, self.image_shape[0], *self.labels.shape)
        return images, self.labels.from_point(free)

    @property
    def point_shape(self) -> tuple[int, int, int, int]:
        """Of the images that a point holds, [B, C, h, w]."""
        count, channels, *sides = self.image_shape
        height, width = (max(1, math.ceil(side / self.scale)) for side in sides)
        return count, channels, height, width

    def at_scale(self, scale: int) -> Objective:
        """The same with images that are so many times smaller, and enlarged before the network sees them."""
        found = copy.copy(self)
        found.scale = scale
        return found

    def point_at(self, point: Tensor, scale: int) -> Tensor:
        """A point of this objective as one of the objective at another scale, with the same labels."""
        size = math.prod(self.point_shape)
        images = point[:, :size].reshape(-1, *self.point_shape)
        wanted = self.at_scale(scale).point_shape
        other = F.interpolate(images.flatten(0, 1), size=wanted[2:], mode="bilinear", antialias=True)
        return torch.cat([other.reshape(len(point), -1), point[:, size:]], 1)

    def select_rows(self, rows: Tensor) -> Objective:
        """The same for some of the targets only; of a single point there are none to leave out."""
        if self.joined:
            return self
        labels = self.labels
        return Objective(
            self.simulation.select_rows(rows),
            {name: tensor[rows] for name, tensor in self.observed.items()},
            FixedLabels(labels.values[rows]) if isinstance(labels, FixedLabels) else labels,
            image_shape=self.image_shape,
            distance=self._distance_from,
            smoothness=self.smoothness,
            priors=[(weight, prior.select_rows(rows)) for weight, prior in self.priors],
            scale=self.scale,
        )


def enlarge(images: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Images [N, B, C, h, w] at the size of `shape` [B, C, H, W]."""
    if images.shape[-2:] == torch.Size(shape[-2:]):
        return images
    larger = F.interpolate(images.flatten(0, 1), size=shape[-2:], mode="bilinear")
    return larger.unflatten(0, images.shape[:2])
