"""Segmentation: one binary mask per image; loss: soft Dice and cross-entropy, metric: Dice per patient."""

import functools
import warnings
from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from polyclinic.errors import BadInput
from polyclinic.extras import need
from polyclinic.tasks.task import Sums, Target, Task

#: what `surface_distances` adds up over images
DISTANCES = ("hausdorff95", "average_surface_distance", "outlined")
#: an image's loss is cut off here in coarse scores; chance has about 1.2
LARGEST_LOSS = 3.0


@functools.cache
def soft_dice() -> Callable[[Tensor, Tensor], Tensor]:
    """MONAI's soft Dice loss of each image; imported when it is needed, as that takes longer than most commands."""
    from monai.losses import DiceLoss

    return DiceLoss(sigmoid=True, reduction="none")


class Segmentation(Task):
    """Output: logits [B, 1, H, W]; targets: float32 [B, 1, H, W] of 0 and 1."""

    name: Literal["segmentation"] = "segmentation"
    surface_distances: bool = Field(False, description="outlines' distances in pixels, too: Hausdorff (95 %), average")

    like: ClassVar[Literal["classification", "regression", "segmentation"]] = "segmentation"
    metric: ClassVar[str] = "dice"
    better: ClassVar[Literal["higher", "lower"]] = "higher"
    dense: ClassVar[bool] = True

    def outputs(self, target: Target) -> int:
        need("monai", "task.name: 'segmentation'")
        return 1

    def targets(self, labels: Tensor, masks: Tensor | None = None) -> Tensor:
        if masks is None:
            raise BadInput("task.name: segmentation needs masks; choose a data source that has them")
        return masks.float()[:, None]

    def losses(self, output: Tensor, targets: Tensor, target: Target) -> Tensor:
        cross_entropy = F.binary_cross_entropy_with_logits(output, targets, reduction="none")
        return soft_dice()(output, targets).flatten() + cross_entropy.mean((1, 2, 3))

    def observe(self, output: Tensor, targets: Tensor, target: Target) -> Tensor:
        """Pixels predicted and true at once, predicted, and true; and the loss: [B, 4].

        With `surface_distances` both distances and whether they are defined follow: [B, 7].
        """
        predicted, true = output.detach() > 0, targets > 0.5
        areas = [mask.sum((1, 2, 3)) for mask in (predicted & true, predicted, true)]
        losses = self.losses(output.detach(), targets, target)
        found = torch.stack([*areas, losses], 1).cpu().double()
        return torch.cat([found, outline_distances(predicted, true)], 1) if self.surface_distances else found

    def sums(self, observations: Tensor, labels: Tensor, cases: Tensor | None, target: Target) -> Sums:
        """A patient's Dice is that of all its images together, so empty slices do not count 1 each."""
        count = len(observations)
        members = torch.arange(count) if cases is None else cases.cpu().unique(return_inverse=True)[1]
        number = int(members.max()) + 1 if count else 0
        areas = torch.zeros(number, 3, dtype=torch.float64).index_add_(0, members, observations[:, :3])
        found = {
            "dice": dice(areas).sum(),
            "cases": torch.tensor(number),
            "loss": observations[:, 3].sum(),
            "count": torch.tensor(count),
        }
        return found | dict(zip(DISTANCES, observations[:, 4:].sum(0), strict=False))

    def bounds(self, target: Target) -> dict[str, tuple[float, str]]:
        """Distances between outlines have no public bound and do not leave."""
        return {"dice": (1.0, "cases"), "loss": (LARGEST_LOSS, "count")}

    def bounded(self, observations: Tensor, target: Target) -> Tensor:
        loss = torch.arange(observations.shape[1]) == 3
        return torch.where(loss, observations.clamp(max=LARGEST_LOSS), observations)

    def check_sums(self, sums: Sums, target: Target) -> None:
        super().check_sums(sums, target)
        self.check_own_sums(sums, ("dice", "cases", "loss", "count", *(DISTANCES if self.surface_distances else ())))
        if not float(sums["dice"]) <= int(sums["cases"]) + 1e-6 or int(sums["cases"]) > int(sums["count"]):
            raise ValueError("a Dice above 1, or more patients than images")

    def finish(self, sums: Sums) -> dict[str, float]:
        if int(sums["count"]) == 0:
            return {}
        found = {"dice": float(sums["dice"]) / int(sums["cases"]), "loss": float(sums["loss"]) / int(sums["count"])}
        outlined = float(sums.get("outlined", 0))  # images whose two masks both have an outline
        return found | {name: float(sums[name]) / outlined for name in DISTANCES[:2] if outlined}


def dice(areas: Tensor) -> Tensor:
    """Dice of each row (overlap, predicted, true), [N, 3] to [N]; 1 where both masks are empty."""
    overlap, both = areas[:, 0], areas[:, 1] + areas[:, 2]
    return torch.where(both == 0, 1.0, 2 * overlap / both.clamp(min=1))


def outline_distances(predicted: Tensor, true: Tensor) -> Tensor:
    """Hausdorff distance (95th percentile) and average surface distance of each image in pixels, both symmetric, and 1;
    zeros where one of the masks is empty and there is no distance. By MONAI. Masks [B, 1, H, W]; float64 [B, 3]."""
    from monai.metrics import compute_average_surface_distance, compute_hausdorff_distance

    warnings.filterwarnings("ignore", "monai.metrics.utils get_mask_edges", FutureWarning)  # MONAI 1.6 about itself
    found = torch.zeros(len(predicted), 3, dtype=torch.float64)
    both = (predicted.any((1, 2, 3)) & true.any((1, 2, 3))).cpu()
    if both.any():
        guess, truth = (mask.cpu()[both].float() for mask in (predicted, true))
        hausdorff = compute_hausdorff_distance(guess, truth, include_background=True, percentile=95)
        average = compute_average_surface_distance(guess, truth, include_background=True, symmetric=True)
        found[both] = torch.cat([hausdorff, average, torch.ones_like(average)], 1).double().cpu()
    return found
