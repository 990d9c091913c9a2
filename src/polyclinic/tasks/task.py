"""A task: the `[task]` table of a study; what the head gives, what the loss is, and metrics that add."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyclinic.settings import Settings
from polyclinic.tasks.coarse import significant

Sums = dict[str, Tensor]


@dataclass(frozen=True)
class Target:
    """What is public about the labels; the fields mean what they mean in `Dataset`."""

    classes: tuple[str, ...] = ()
    unit: str = ""
    label_range: tuple[float, float] | None = None


class Task(Settings):
    """One subclass per task. It holds configuration only: what depends on the data comes as a Target.

    Training:    loss(output, targets(labels, masks), target)
    Evaluation:  observe each batch, take the site's sums, add the sites' sums, finish once.
    """

    name: str = Field(description="what is learned: classification, regression or segmentation")

    #: whose labels it takes: a source or a method that can do that task can do this one
    like: ClassVar[Literal["classification", "regression", "segmentation"]]
    metric: ClassVar[str]  #: the metric by which models are selected, a key of `finish`
    better: ClassVar[Literal["higher", "lower"]]
    dense: ClassVar[bool] = False  #: needs a backbone that gives a map, not a vector

    @abstractmethod
    def outputs(self, target: Target) -> int:
        """How many units or channels the network's head has."""

    @abstractmethod
    def targets(self, labels: Tensor, masks: Tensor | None = None) -> Tensor:
        """What the loss compares a batch with, from labels [B] and masks uint8 [B, H, W]."""

    @abstractmethod
    def losses(self, output: Tensor, targets: Tensor, target: Target) -> Tensor:
        """The loss of each image, [B], from the network's output and `targets(...)` of the batch."""

    def loss(self, output: Tensor, targets: Tensor, target: Target, weights: Tensor | None = None) -> Tensor:
        """The mean loss of a batch; with `weights` [B], one for each image, the weighted mean.

        For a weight per class, pass `class_weights[labels]`.
        """
        losses = self.losses(output, targets, target)
        return losses.mean() if weights is None else (weights * losses).sum() / weights.sum()

    def predictions(self, output: Tensor, target: Target) -> Tensor:
        """The network's output as what users read: probabilities of classes [B, C], of the mask [B, H, W], values [B].

        A regression whose network gives scaled values overrides it.
        """
        if self.like == "regression":
            return output.squeeze(1)
        return output.sigmoid()[:, 0] if self.dense else output.softmax(1)

    @abstractmethod
    def observe(self, output: Tensor, targets: Tensor, target: Target) -> Tensor:
        """The few facts of each image that metrics need, float64 [B, d] on the CPU. They stay at the site."""

    @abstractmethod
    def sums(self, observations: Tensor, labels: Tensor, cases: Tensor | None, target: Target) -> Sums:
        """A site's share of the metrics, from all its observations [N, d] and labels [N].

        `cases` int64 [N] says which images belong to one patient, or None: every image is a case of its own.
        """

    @staticmethod
    def add(a: Sums, b: Sums) -> Sums:
        """The sums of two sites together."""
        return {name: a[name] + b[name] for name in a}

    def coarse(self, sums: Sums, least: int) -> Sums:
        """The sums as a deployed site releases them: so rounded that little can be learnt about `least` patients.

        Here: means over the images with three significant digits, and counts as they are.
        """
        count = sums["count"].double().clamp(min=1) if "count" in sums else torch.ones((), dtype=torch.float64)
        rounded = {name: significant(value.double() / count) * count for name, value in sums.items()}
        return {name: rounded[name] if value.is_floating_point() else value for name, value in sums.items()}

    @abstractmethod
    def finish(self, sums: Sums) -> dict[str, float]:
        """The metrics; those that the data cannot define (e.g. the AUC of a single class) are left out."""
