"""Classification: cross-entropy; accuracies from a confusion matrix, AUC from histograms of scores."""

from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from polyclinic.errors import BadInput
from polyclinic.metrics.roc import aucs_from_counts
from polyclinic.tasks import task
from polyclinic.tasks.task import AddNoise, Sums, Target, Task

BINS = 1024
#: bins that a deployed site puts together before it looks for small counts
WIDTH = 16
#: the same where scores get noise, which falls on every cell
NOISED_WIDTH = 32
#: bins at either end, of margins beyond 5, that such a site counts as one with the next
TAIL = 256
# Edges of the score histogram: fine around zero, where an untrained network's scores crowd, and ever wider
# (2 % of the score) up to margins of a thousand, where an overconfident one's lie. More bins would tell more
# about single images; fewer would blur the AUC, which errs most where all scores crowd far from zero.
EDGES = 0.05 * torch.sinh(torch.linspace(-10.6, 10.6, BINS - 1, dtype=torch.float64))
#: of the cells that are added up, or get noise (`cells_of`)
CELL_EDGES = EDGES[TAIL + NOISED_WIDTH - 1 : BINS - TAIL - 1 : NOISED_WIDTH].contiguous()


class Classification(Task):
    """One of several classes per image. Output: logits [B, C]; targets: int64 [B]."""

    name: Literal["classification"] = "classification"
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share of a label that is spread over all classes")

    like: ClassVar[Literal["classification", "regression", "segmentation"]] = "classification"
    metric: ClassVar[str] = "accuracy"
    better: ClassVar[Literal["higher", "lower"]] = "higher"
    more_metrics: ClassVar[Mapping[str, Literal["higher", "lower"]]] = {
        "balanced_accuracy": "higher",
        "auc": "higher",
        "loss": "lower",
    }

    def outputs(self, target: Target) -> int:
        if len(target.classes) < 2:
            count = len(target.classes)
            raise BadInput(f"task.name: classification needs two classes or more, and the data names {count}")
        return len(target.classes)

    def targets(self, labels: Tensor, masks: Tensor | None = None) -> Tensor:
        return labels.long()

    def losses(self, output: Tensor, targets: Tensor, target: Target) -> Tensor:
        return F.cross_entropy(output, targets, reduction="none", label_smoothing=self.label_smoothing)

    def mixable(self, targets: Tensor, target: Target) -> Tensor:
        """Shares of the classes, float32 [B, C]."""
        return F.one_hot(targets, len(target.classes)).float()

    def observe(self, output: Tensor, targets: Tensor, target: Target) -> Tensor:
        """The logits, [B, C]."""
        return output.detach().cpu().double()

    def sums(self, observations: Tensor, labels: Tensor, cases: Tensor | None, target: Target) -> Sums:
        """confusion int64 [C, C] (true, predicted), histograms int64 [C, 2, 1024] (the number of images of the other
        classes, and of the class itself, in each bin of scores), loss and count."""
        classes, labels = len(target.classes), labels.cpu().long()
        pairs = labels * classes + observations.argmax(1)
        column = torch.arange(classes)
        rows = 2 * column + (labels[:, None] == column).long()
        places = rows * BINS + torch.bucketize(margins(observations).contiguous(), EDGES)
        histograms = places.flatten().bincount(minlength=classes * 2 * BINS).reshape(classes, 2, BINS)
        return {
            "confusion": pairs.bincount(minlength=classes * classes).reshape(classes, classes),
            "histograms": histograms,
            "loss": F.cross_entropy(observations, labels, reduction="none").sum(),  # without smoothing
            "count": torch.tensor(len(labels)),
        }

    def coarse(self, sums: Sums, least: int, target: Target) -> Sums:
        """Histograms and a confusion matrix that tell of no fewer than `least` images. The loss is worked out from the
        histograms, so that it tells nothing beyond them."""
        if "confusion" not in sums:
            return super().coarse(sums, least, target)
        rows = sums["histograms"]
        merged = [task.merge_small(row, least, WIDTH, TAIL) for row in rows.reshape(-1, rows.shape[-1])]
        histograms = torch.stack(merged).reshape(rows.shape)
        confusion = task.round_counts(sums["confusion"], least) * bool(histograms[:, 1].any())
        return _told(confusion, histograms, confusion.sum())

    def summable(self, sums: Sums, largest: float) -> Sums:
        found = super().summable(sums, largest)
        return {**found, "histograms": cells_of(sums["histograms"])} if "histograms" in sums else found

    def opened(self, sums: Sums) -> Sums:
        fine = {"histograms": bins_of(sums["histograms"])} if "histograms" in sums else {}
        return {**sums, **fine}

    @property
    def can_be_noised(self) -> bool:
        return type(self).sums is Classification.sums

    def noised(self, sums: Sums, noise: AddNoise, target: Target) -> Sums:
        """An image is in one cell of the confusion matrix, and in one of each class's histograms; of two classes the
        second one's are enough, as the first one's mirror them. All counts add up to the images that were scored."""
        classes, count = len(target.classes), int(sums["count"])
        rows = cells_of(sums["histograms"][1:] if classes == 2 else sums["histograms"])
        length = (1 + len(rows)) ** 0.5
        told = task.nearest_counts(task.with_noise(sums["confusion"].flatten(), length, noise), count)
        confusion = task.whole_counts(told, count).reshape(classes, classes)
        own = confusion.sum(1)[1:] if classes == 2 else confusion.sum(1)
        rest_and_own = zip(task.with_noise(rows, length, noise), own.tolist(), strict=True)
        found = [
            torch.stack([task.nearest_counts(rest, count - mine), task.nearest_counts(of_class, mine)])
            for (rest, of_class), mine in rest_and_own
        ]
        histograms = bins_of(torch.stack(found))
        if classes == 2:
            histograms = torch.cat([histograms.flip(1, 2), histograms])
        return _told(confusion, histograms, sums["count"])

    def check_sums(self, sums: Sums, target: Target) -> None:
        super().check_sums(sums, target)
        classes = len(target.classes)
        shapes = {"confusion": (classes, classes), "histograms": (classes, 2, BINS), "loss": (), "count": ()}
        if {name: tuple(sums[name].shape) for name in shapes if name in sums} != shapes:
            raise ValueError(f"the sums are not {', '.join(shapes)} of {classes} classes")
        if sums["confusion"].is_floating_point():  # histograms may be: `coarse` spreads a cell over its bins
            raise ValueError("the confusion matrix must be whole numbers")
        self.check_own_sums(sums, ("loss", "count"))
        if float(sums["confusion"].double().sum()) != int(sums["count"]):  # whole numbers could wrap around
            raise ValueError("the confusion matrix is of another number of images than 'count'")
        if not 0 <= float(sums["histograms"].min()) <= float(sums["histograms"].max()) <= task.MOST_IMAGES:
            raise ValueError(f"a histogram counts fewer than 0 or more than {task.MOST_IMAGES} images")
        # a deployed site rounds both, the confusion matrix cell by cell
        if int(sums["count"]) > 4 * float(sums["histograms"][:, 1].sum()):
            raise ValueError("the histograms are of far fewer images than 'count'")
        if float(sums["histograms"][:, 1].sum()) > 4 * int(sums["count"]) + 100 * classes**2:
            raise ValueError("the histograms are of far more images than 'count'")
        # the images of all other classes: as many as the classes have themselves, but for rounding at a deployed site
        if float(sums["histograms"][:, 0].sum(1).max()) > 4 * float(sums["histograms"][:, 1].sum()) + 100 * classes:
            raise ValueError("a histogram has far more images of other classes than these have")

    def finish(self, sums: Sums) -> dict[str, float]:
        confusion, count = sums["confusion"].double(), int(sums["count"])
        if count == 0:
            return {}
        seen = confusion.sum(1) > 0
        recalls = confusion.diag()[seen] / confusion.sum(1)[seen]
        metrics = {
            "accuracy": float(confusion.diag().sum()) / count,
            "balanced_accuracy": float(recalls.mean()),
            "loss": float(sums["loss"]) / count,
        }
        # of two classes the second is the positive one; of more, each in turn against all others
        histograms = sums["histograms"][1:] if len(confusion) == 2 else sums["histograms"]
        areas = aucs_from_counts(histograms[:, 1].numpy(), histograms[:, 0].numpy())
        areas = areas[~np.isnan(areas)]
        return metrics | ({"auc": sum(areas.tolist()) / len(areas)} if len(areas) else {})


def margins(logits: Tensor) -> Tensor:
    """Margin of each class above all others together, in logits: log p - log(1 - p), [N, C]."""
    classes = logits.shape[1]
    itself = torch.eye(classes, dtype=torch.bool)
    others = logits[:, None, :].expand(-1, classes, -1).masked_fill(itself, -torch.inf)
    return logits - others.logsumexp(2)


def cells_of(histograms: Tensor) -> Tensor:
    """Histograms [C, 2, 1024] in the few cells that get noise [C, 2, K]: the middle in equal steps, and with its first
    and last cell all that lies beyond."""
    inner = histograms[..., TAIL : BINS - TAIL].clone()
    inner[..., 0] += histograms[..., :TAIL].sum(-1)
    inner[..., -1] += histograms[..., BINS - TAIL :].sum(-1)
    return inner.unflatten(-1, (-1, NOISED_WIDTH)).sum(-1)


def bins_of(cells: Tensor) -> Tensor:
    """The images of each cell spread evenly over its bins, float64 [C, 2, 1024]."""
    found = torch.zeros(*cells.shape[:-1], BINS, dtype=torch.float64)
    found[..., TAIL : BINS - TAIL] = cells.double().repeat_interleave(NOISED_WIDTH, -1) / NOISED_WIDTH
    return found


def _told(confusion: Tensor, histograms: Tensor, count: Tensor) -> Sums:
    """Sums whose loss is worked out from the histograms."""
    loss, seen = loss_in(histograms)
    mean = torch.tensor(loss / seen if seen else 0.0, dtype=torch.float64)
    return {"confusion": confusion, "histograms": histograms, "loss": mean * count, "count": count}


def loss_in(histograms: Tensor) -> tuple[float, float]:
    """The summed loss of the images in histograms [C, 2, K] of their margins, and how many images these have.

    The cross-entropy of an image is log(1 + exp(-margin)) of its own class."""
    outer = torch.cat([EDGES[:1], EDGES, EDGES[-1:]])
    middles = (outer[1:] + outer[:-1]) / 2
    own = histograms[:, 1].double().sum(0)
    return float((own * F.softplus(-middles)).sum()), float(own.sum())
