"""The loss that gradient inversion minimises, with its gradient, for N independent targets in one batch."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from polyclinic.attacks.gradient_inversion.distances import Distance, DistanceFrom, euclidean, total_variation
from polyclinic.attacks.gradient_inversion.priors import Prior
from polyclinic.attacks.gradient_inversion.simulation import Simulation

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

    A point holds one target per row: its images [B, C, H, W], then its free labels, flattened.
    """

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

    def __call__(self, point: Tensor) -> tuple[Tensor, Tensor]:
        point = point.detach().requires_grad_()
        images, labels = self.unpack(point)
        sent = self.simulation.of_targets(images, labels)
        loss = self._distance([sent[name].flatten(1) for name in self.observed])
        loss = loss + self.penalty(images)
        (gradient,) = torch.autograd.grad(loss.sum(), point)  # no target's loss depends on another's row
        return loss.detach(), gradient

    def penalty(self, images: Tensor) -> Tensor:
        """What is added to the distance [N], whatever was sent: roughness, and priors, of images [N, B, C, H, W]."""
        found = self.smoothness * total_variation(images) if self.smoothness else images.new_zeros(len(images))
        for weight, prior in self.priors:
            found = found + weight * prior(images)
        return found

    def unpack(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Images [N, B, C, H, W] and labels [N, B, ...] of a point [N, D]."""
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
        """The same for some of the targets only."""
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


class JoinedObjective:
    """Several rounds of the same images: one point [1, D] must explain what was sent in each of R rounds."""

    def __init__(self, rounds: Objective) -> None:
        """`rounds`: the objective with a target for each round. Labels are those of the first."""
        self.rounds = rounds
        if isinstance(rounds.labels, FixedLabels):
            first = rounds.labels.values[:1]
            rounds.labels = FixedLabels(first.expand_as(rounds.labels.values))

    def __call__(self, point: Tensor) -> tuple[Tensor, Tensor]:
        loss, gradient = self.rounds(point.expand(self._count, -1))
        return loss.mean(0, keepdim=True), gradient.mean(0, keepdim=True)

    @property
    def _count(self) -> int:
        return len(next(iter(self.rounds.observed.values())))

    @property
    def labels(self) -> FreeLabels | FixedLabels:
        return self.rounds.labels

    def penalty(self, images: Tensor) -> Tensor:
        return self.rounds.penalty(images)

    def unpack(self, point: Tensor) -> tuple[Tensor, Tensor]:
        images, labels = self.rounds.unpack(point.expand(self._count, -1))
        return images[:1], labels[:1]

    def at_scale(self, scale: int) -> JoinedObjective:
        return JoinedObjective(self.rounds.at_scale(scale))

    def point_at(self, point: Tensor, scale: int) -> Tensor:
        return self.rounds.point_at(point, scale)

    @property
    def point_shape(self) -> tuple[int, int, int, int]:
        return self.rounds.point_shape

    def select_rows(self, rows: Tensor) -> JoinedObjective:
        return self
