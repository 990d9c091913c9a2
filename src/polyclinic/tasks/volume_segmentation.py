"""Segmentation of volumes: K structures, as classes that exclude each other or as regions that overlap.

Loss: Dice and cross-entropy; metrics by structure and case: Dice, and in millimetres the Hausdorff distance (95 %) and
the surface Dice. All are MONAI's.
"""

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyclinic.errors import BadInput
from polyclinic.extras import need
from polyclinic.tasks.task import Sums, Target, Task

#: metrics of each structure of a case, in the order in which `observe_case` has them
SCORES = ("dice", "hd95", "surface_dice")
#: a case's loss, and a distance in millimetres, is cut off here in coarse scores
LARGEST_LOSS, LARGEST_DISTANCE = 4.0, 500.0


@functools.cache
def dice_and_cross_entropy(*, overlapping: bool, deep: bool) -> Callable[..., Tensor]:
    """The mean loss of logits [B, C, ...]; `overlapping`: C is 1, and a target is 0 or 1; else it is a class [B, 1].
    `deep`: of several such logits, each with half of the weight of the one before."""
    from monai.losses import DeepSupervisionLoss, DiceCELoss

    loss = DiceCELoss(sigmoid=True) if overlapping else DiceCELoss(False, to_onehot_y=True, softmax=True)
    return DeepSupervisionLoss(loss) if deep else loss


class VolumeSegmentation(Task):
    """Output: logits [B, C, X, Y, Z], C being the structures, with the background before classes that exclude each
    other; in training perhaps [B, heads, C, X, Y, Z]. Targets: the values of the mask, int64 [B, 1, X, Y, Z]."""

    name: Literal["volume-segmentation"] = "volume-segmentation"
    surface_distances: bool = Field(True, description="hd95 (Hausdorff distance, 95 %), surface_dice, in millimetres")
    tolerance: float = Field(1.0, gt=0, le=50, description="millimetres that surface_dice lets a surface lie wrong")
    empty: Literal["perfect", "left out"] = Field(
        "perfect",
        description="how a structure counts that a case has neither in its mask nor in its prediction: perfect (Dice "
        "1, distance 0), or left out. Where only one of them has it, Dice is 0 and the distance the volume's diagonal",
    )

    patches: int = Field(2, ge=1, le=1000, description="patches of each case in a pass over a site's cases")
    foreground: float = Field(
        0.33, ge=0, le=1, description="share of patches whose middle lies in a structure; others lie elsewhere"
    )
    accumulate: int = Field(
        1,
        ge=1,
        description="parts in which a batch goes through the network before a step is taken: the same step (but for "
        "batch norm) with less memory",
    )
    overlap: float = Field(0.5, ge=0, lt=1, description="share by which windows overlap when a volume is predicted")

    like: ClassVar[Literal["classification", "regression", "segmentation"]] = "segmentation"
    metric: ClassVar[str] = "dice"
    better: ClassVar[Literal["higher", "lower"]] = "higher"
    more_metrics: ClassVar[Mapping[str, Literal["higher", "lower"]]] = {
        **{"loss": "lower", "hd95": "lower", "surface_dice": "higher"}
    }
    dense: ClassVar[bool] = True
    volumes: ClassVar[bool] = True

    def outputs(self, target: Target) -> int:
        need("monai", "task.name: 'volume-segmentation'")
        if not target.structures:
            raise BadInput("data.structures: missing; name the structures and their values: { tumour = [1] }")
        return len(target.structures) + (not overlapping(target))

    def targets(self, labels: Tensor, masks: Tensor | None = None) -> Tensor:
        if masks is None:
            raise BadInput("task.name: volume-segmentation needs masks; choose a data source that has them")
        return masks.long()[:, None]

    def losses(self, output: Tensor, targets: Tensor, target: Target) -> Tensor:
        deep = output.ndim > targets.ndim
        loss = dice_and_cross_entropy(overlapping=overlapping(target), deep=deep)
        found = []
        for logits, values in zip(output, targets, strict=True):
            if overlapping(target):  # each structure by itself
                truth, logits = structures_of(values[0], target)[:, None].float(), logits.unsqueeze(-4)
            else:
                truth, logits = classes_of(values, target)[None], logits.unsqueeze(-5)
            found.append(loss(list(logits) if deep else logits, truth))
        return torch.stack(found)

    def predicted(self, output: Tensor, target: Target) -> Tensor:
        """Which voxels belong to each structure, bool [B, K, X, Y, Z]."""
        if overlapping(target):
            return output > 0
        chosen = output.argmax(1, keepdim=True)
        return chosen == torch.arange(1, output.shape[1], device=output.device)[:, None, None, None]

    def observe(self, output: Tensor, targets: Tensor, target: Target) -> Tensor:
        """As `observe_case`, with voxels of a millimetre."""
        pairs = zip(output, targets, strict=True)
        return torch.cat([self.observe_case(one[None], values[None], target, (1.0, 1.0, 1.0)) for one, values in pairs])

    def observe_case(self, output: Tensor, targets: Tensor, target: Target, spacing: tuple[float, ...]) -> Tensor:
        """The loss and then Dice, HD95 and surface Dice of every structure, NaN where they do not count:
        float64 [1, 1 + 3 K]."""
        guess, truth = self.predicted(output.detach(), target), structures_of(targets[0, 0], target)[None]
        loss = self.losses(output.detach(), targets, target)
        scores = self.scores(guess.cpu(), truth.cpu(), spacing)
        return torch.cat([loss.cpu().double(), scores.flatten()])[None]

    def scores(self, guess: Tensor, truth: Tensor, spacing: tuple[float, ...]) -> Tensor:
        """Dice, HD95 and surface Dice of masks [1, K, X, Y, Z], float64 [K, 3]; NaN where they do not count."""
        both, neither = _each(guess) & _each(truth), ~_each(guess) & ~_each(truth)
        inside = (guess & truth).sum((0, 2, 3, 4)), guess.sum((0, 2, 3, 4)) + truth.sum((0, 2, 3, 4))
        perfect = torch.tensor([1.0, 0.0, 1.0] if self.empty == "perfect" else [torch.nan] * 3, dtype=torch.float64)
        found = torch.zeros(len(both), len(SCORES), dtype=torch.float64)
        found[:, 0] = 2 * inside[0] / inside[1].clamp(min=1)
        found[:, 1] = math.dist([0] * len(spacing), [n * s for n, s in zip(guess.shape[2:], spacing, strict=True)])
        if self.surface_distances and both.any():
            found[both, 1:] = surface_scores(guess[:, both], truth[:, both], spacing, self.tolerance)
        found[neither] = perfect
        return found if self.surface_distances else found.index_fill(1, torch.tensor([1, 2]), torch.nan)

    def sums(self, observations: Tensor, labels: Tensor, cases: Tensor | None, target: Target) -> Sums:
        """Each case counts once, whoever's it is: a patient has one volume, or several of different times."""
        found = {"loss": observations[:, 0].sum(), "count": torch.tensor(len(observations))}
        for column, (name, score) in zip(observations[:, 1:].T, names_of(target), strict=True):
            found[f"{score}/{name}"] = column.nansum()
            found[f"scored {score}/{name}"] = (~column.isnan()).sum()
        return found

    def bounds(self, target: Target) -> dict[str, tuple[float, str]]:
        bounds = {"dice": 1.0, "hd95": LARGEST_DISTANCE, "surface_dice": 1.0}
        known = {f"{score}/{name}": (bounds[score], f"scored {score}/{name}") for name, score in names_of(target)}
        return {"loss": (LARGEST_LOSS, "count"), **known}

    def bounded(self, observations: Tensor, target: Target) -> Tensor:
        limits = torch.tensor([LARGEST_LOSS, *[1.0, LARGEST_DISTANCE, 1.0] * len(target.structures)])
        return torch.where(observations.isnan(), observations, observations.minimum(limits.to(observations)))

    def check_sums(self, sums: Sums, target: Target) -> None:
        super().check_sums(sums, target)
        self.check_own_sums(sums, ("loss", "count", *(f"{score}/{name}" for name, score in names_of(target))))
        for name, score in names_of(target):
            scored = int(sums[f"scored {score}/{name}"])
            most = scored * (LARGEST_DISTANCE * 10 if score == "hd95" else 1.0) + 1e-6
            if scored > int(sums["count"]) or float(sums[f"{score}/{name}"]) > most:
                raise ValueError(f"{score} of '{name}' is larger than it can be")

    def finish(self, sums: Sums) -> dict[str, float]:
        """Metrics of each structure (`dice_core`), their means over structures (`dice`), and the loss."""
        if int(sums["count"]) == 0:
            return {}
        found = {"loss": float(sums["loss"]) / int(sums["count"])}
        for score in SCORES:
            named = [name for name in sums if name.startswith(f"{score}/") and int(sums[f"scored {name}"])]
            means = {name.replace("/", "_", 1): float(sums[name]) / int(sums[f"scored {name}"]) for name in named}
            found |= means | ({score: sum(means.values()) / len(means)} if means else {})
        return found


@functools.cache
def overlapping(target: Target) -> bool:
    """Whether a voxel can belong to several structures."""
    values = [value for _, some in target.structures for value in some]
    return len(set(values)) < len(values)


def names_of(target: Target) -> list[tuple[str, str]]:
    """Structures and their scores, in the order of observations."""
    return list(itertools.product([name for name, _ in target.structures], SCORES))


def structures_of(values: Tensor, target: Target) -> Tensor:
    """Which voxels of a mask [X, Y, Z] belong to each structure, bool [K, X, Y, Z]."""
    known = [torch.tensor(some, device=values.device) for _, some in target.structures]
    return torch.stack([torch.isin(values, one) for one in known])


def classes_of(values: Tensor, target: Target) -> Tensor:
    """The number of each voxel's structure, from 1 on, or 0: float32, of the same shape."""
    found = torch.zeros_like(values, dtype=torch.float32)
    for number, (_, some) in enumerate(target.structures, start=1):
        found[torch.isin(values, torch.tensor(some, device=values.device))] = number
    return found


def surface_scores(guess: Tensor, truth: Tensor, spacing: tuple[float, ...], tolerance: float) -> Tensor:
    """HD95 in millimetres and surface Dice of masks [1, K, X, Y, Z], none of them empty, by MONAI; float64 [K, 2]."""
    from monai.metrics import compute_hausdorff_distance, compute_surface_dice

    warnings.filterwarnings("ignore", "monai.metrics.utils get_mask_edges", FutureWarning)  # MONAI 1.6 about itself
    sides, limits = [float(side) for side in spacing], [tolerance] * guess.shape[1]
    hausdorff = compute_hausdorff_distance(guess.float(), truth.float(), True, percentile=95, spacing=sides)
    surface = compute_surface_dice(guess.float(), truth.float(), limits, True, spacing=sides)
    return torch.stack([hausdorff[0], surface[0]], 1).double().cpu()


def _each(masks: Tensor) -> Tensor:
    """Whether a structure is there, bool [K]."""
    return masks[0].flatten(1).any(1)
