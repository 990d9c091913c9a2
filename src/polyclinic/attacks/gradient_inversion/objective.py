"""The loss that gradient inversion minimises, with its gradient, for N independent targets in one batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from polyclinic.attacks.gradient_inversion.distances import Distance, DistanceFrom, euclidean, total_variation
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
    ) -> None:
        """`observed`: what the sites sent, [N, ...] by name. `smoothness`: weight of the total variation."""
        self.simulation = simulation
        self.observed = {name: observed[name] for name in simulation.names}
        self.labels = labels
        self.image_shape = image_shape
        self.smoothness = smoothness
        self._distance_from = distance
        self._distance: Distance = distance([tensor.flatten(1) for tensor in self.observed.values()])

    def __call__(self, point: Tensor) -> tuple[Tensor, Tensor]:
        point = point.detach().requires_grad_()
        images, labels = self.unpack(point)
        sent = self.simulation.of_targets(images, labels)
        loss = self._distance([sent[name].flatten(1) for name in self.observed])
        if self.smoothness:
            loss = loss + self.smoothness * total_variation(images)
        (gradient,) = torch.autograd.grad(loss.sum(), point)  # no target's loss depends on another's row
        return loss.detach(), gradient

    def unpack(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Images [N, B, C, H, W] and labels [N, B, ...] of a point [N, D]."""
        size = math.prod(self.image_shape)
        images = point[:, :size].reshape(-1, *self.image_shape)
        if isinstance(self.labels, FixedLabels):
            return images, self.labels.values
        free = point[:, size:].reshape(-1, self.image_shape[0], *self.labels.shape)
        return images, self.labels.from_point(free)

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
        )
