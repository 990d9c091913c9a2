"""Several labels of an image: a probability for each by itself; AUC, sensitivity and specificity by label.

A class of the data is a set of labels, `cyst|mass`, or `none`; the head has a unit for each label.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from polyclinic.errors import BadInput
from polyclinic.metrics.roc import aucs_from_counts
from polyclinic.settings import NO_LABEL, SEVERAL
from polyclinic.tasks.classification import BINS, EDGES, Classification
from polyclinic.tasks.task import Sums, Target, Task

OF = "of "  #: before a label, in the name of its table of images [2, 2] (true, predicted)


def labels_in(classes: Sequence[str]) -> tuple[str, ...]:
    """The labels of which classes are sets, in their order."""
    return tuple(sorted({label for name in classes for label in name.split(SEVERAL)} - {NO_LABEL}))


class MultiLabel(Classification):
    """Any number of several labels per image. Output: logits [B, L]; targets: int64 [B], numbers of sets of labels."""

    name: Literal["multilabel"] = "multilabel"  # type: ignore[assignment]

    metric: ClassVar[str] = "auc"
    more_metrics: ClassVar[Mapping[str, Literal["higher", "lower"]]] = {
        "accuracy": "higher",
        "balanced_accuracy": "higher",
        "loss": "lower",
    }

    def outputs(self, target: Target) -> int:
        if not (labels := labels_in(target.classes)):
            raise BadInput("data.several: no image has a label; name the columns, or the sign between labels")
        return len(labels)

    def losses(self, output: Tensor, targets: Tensor, target: Target) -> Tensor:
        sets = _sets(target).to(output.device)
        truth = targets @ sets if targets.is_floating_point() else sets[targets]
        truth = truth * (1 - self.label_smoothing) + self.label_smoothing / 2
        return F.binary_cross_entropy_with_logits(output, truth.to(output.dtype), reduction="none").mean(1)

    def predictions(self, output: Tensor, target: Target) -> Tensor:
        return output.sigmoid()

    def sums(self, observations: Tensor, labels: Tensor, cases: Tensor | None, target: Target) -> Sums:
        """Of each label a table int64 [2, 2] (true, predicted); histograms int64 [L, 2, 1024] of logits, of images
        without the label and with it; loss and count."""
        truth, names = _sets(target)[labels.cpu().long()].long(), labels_in(target.classes)
        pairs = truth * 2 + (observations > 0).long()
        tables = {OF + name: pairs[:, i].bincount(minlength=4).reshape(2, 2) for i, name in enumerate(names)}
        rows = 2 * torch.arange(len(names)) + truth
        places = rows * BINS + torch.bucketize(observations.contiguous(), EDGES)
        losses = F.binary_cross_entropy_with_logits(observations, truth.double(), reduction="none")
        return {
            **tables,
            "histograms": places.flatten().bincount(minlength=len(names) * 2 * BINS).reshape(len(names), 2, BINS),
            "loss": losses.mean(1).sum(),
            "count": torch.tensor(len(labels)),
        }

    def check_sums(self, sums: Sums, target: Target) -> None:
        Task.check_sums(self, sums, target)
        self.check_own_sums(sums, ("loss", "count"))
        names = labels_in(target.classes)
        shapes = {**{OF + name: (2, 2) for name in names}, "histograms": (len(names), 2, BINS), "loss": (), "count": ()}
        if {name: tuple(one.shape) for name, one in sums.items()} != shapes:
            raise ValueError(f"the sums are not {', '.join(shapes)}")
        if any(int(sums[OF + name].sum()) != int(sums["count"]) for name in names):
            raise ValueError("the table of a label is of another number of images than 'count'")

    def finish(self, sums: Sums) -> dict[str, float]:
        count = int(sums["count"])
        if count == 0:
            return {}
        names = sorted(name.removeprefix(OF) for name in sums if name.startswith(OF))
        tables = torch.stack([sums[OF + name] for name in names]).double()
        areas = aucs_from_counts(sums["histograms"][:, 1].numpy(), sums["histograms"][:, 0].numpy())
        found = {"accuracy": float((tables[:, 0, 0] + tables[:, 1, 1]).sum() / tables.sum().clamp(min=1))}
        of_label: dict[str, float] = {}
        recalls = []
        for name, table, area in zip(names, tables, areas.tolist(), strict=True):
            own = {BY[i]: float(table[i, i] / table[i].sum()) for i in (0, 1) if table[i].sum()}
            recalls += [sum(own.values()) / 2] if len(own) == 2 else []
            own |= {} if np.isnan(area) else {"auc": area}
            of_label |= {f"{what} of {name}": value for what, value in sorted(own.items())}
        if recalls:
            found["balanced_accuracy"] = sum(recalls) / len(recalls)
        known = areas[~np.isnan(areas)].tolist()
        mean = {"auc": sum(known) / len(known)} if known else {}
        return {**found, "loss": float(sums["loss"]) / count, **mean, **of_label}


BY = ("specificity", "sensitivity")  #: of a label's table, by row


def _sets(target: Target) -> Tensor:
    """float32 [K, L]: the labels of each class."""
    names = labels_in(target.classes)
    return torch.tensor([[float(label in name.split(SEVERAL)) for label in names] for name in target.classes])
