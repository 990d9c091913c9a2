"""Regression: one number per image, e.g. bone age in months; mean absolute and root mean square error."""

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from polyclinic.errors import BadInput
from polyclinic.tasks.task import AddNoise, Sums, Target, Task, with_noise

CRITERIA: dict[str, Callable[..., Tensor]] = {"l1": F.l1_loss, "mse": F.mse_loss, "huber": F.huber_loss}


#: the largest error that counts in noised scores, as a share of the public range of labels
LARGEST_ERROR = 0.25
#: metrics in the unit of the label
IN_UNITS = ("mae", "rmse")


class Regression(Task):
    """Output: [B, 1], scaled so that the public label range is -1 to 1; targets: float32 [B], as labelled."""

    name: Literal["regression"] = "regression"
    criterion: Literal["l1", "mse", "huber"] = Field("l1", description="the loss, with labels' range scaled to -1 to 1")

    like: ClassVar[Literal["classification", "regression", "segmentation"]] = "regression"
    metric: ClassVar[str] = "mae"
    better: ClassVar[Literal["higher", "lower"]] = "lower"
    more_metrics: ClassVar[Mapping[str, Literal["higher", "lower"]]] = {"rmse": "lower", "loss": "lower"}

    def outputs(self, target: Target) -> int:
        scale(target)
        return 1

    def targets(self, labels: Tensor, masks: Tensor | None = None) -> Tensor:
        return labels.float()

    def losses(self, output: Tensor, targets: Tensor, target: Target) -> Tensor:
        middle, half = scale(target)
        return CRITERIA[self.criterion](output.squeeze(1), (targets - middle) / half, reduction="none")

    def observe(self, output: Tensor, targets: Tensor, target: Target) -> Tensor:
        """The network's output as it is, [B, 1]."""
        return output.detach().cpu().double()

    def sums(self, observations: Tensor, labels: Tensor, cases: Tensor | None, target: Target) -> Sums:
        labels = labels.cpu().double()
        errors = self.predictions(observations, target) - labels
        return {
            "absolute_error": errors.abs().sum(),
            "squared_error": errors.square().sum(),
            "loss": self.losses(observations, labels, target).sum(),
            "count": torch.tensor(len(labels)),
        }

    def bounds(self, target: Target) -> dict[str, tuple[float, str]]:
        """Labels and bounded predictions lie in the public range of labels, -1 to 1 after scaling."""
        _, half = scale(target)
        worst = CRITERIA[self.criterion](torch.tensor(2.0), torch.tensor(0.0))
        return {
            "absolute_error": (2 * half, "count"),
            "squared_error": ((2 * half) ** 2, "count"),
            "loss": (float(worst), "count"),
        }

    def bounded(self, observations: Tensor, target: Target) -> Tensor:
        return observations.clamp(-1, 1)

    @property
    def can_be_noised(self) -> bool:
        return type(self).sums is Regression.sums

    def near(self, observations: Tensor, targets: Tensor, target: Target) -> Tensor:
        """Outputs within a quarter of the label range of the truth: larger errors count as so large."""
        middle, half = scale(target)
        truth = ((targets.cpu().double() - middle) / half)[:, None]
        far = 2 * LARGEST_ERROR
        return (observations - truth).nan_to_num(far, far, -far).clamp(-far, far) + truth

    def noised(self, sums: Sums, noise: AddNoise, target: Target) -> Sums:
        """Both errors of an image, each as a share of the largest, make a vector of at most length sqrt(2). The loss is
        worked out from them."""
        _, half = scale(target)
        most, count = 2 * LARGEST_ERROR * half, sums["count"]
        shares = torch.stack([sums["absolute_error"] / most, sums["squared_error"] / most**2])
        absolute, squared = with_noise(shares, 2**0.5, noise).clamp(torch.tensor(0.0), count.double())
        absolute, squared = absolute * most, squared * most**2
        # errors are at most half of what the scaled loss calls 1, where the Huber loss is half of the square
        losses = {"l1": absolute / half, "mse": squared / half**2, "huber": squared / half**2 / 2}
        return {"absolute_error": absolute, "squared_error": squared, "loss": losses[self.criterion], "count": count}

    def check_sums(self, sums: Sums, target: Target) -> None:
        super().check_sums(sums, target)
        self.check_own_sums(sums, ("absolute_error", "squared_error", "loss", "count"))

    def finish(self, sums: Sums) -> dict[str, float]:
        count = int(sums["count"])
        if count == 0:
            return {}
        return {
            "mae": float(sums["absolute_error"]) / count,
            "rmse": (float(sums["squared_error"]) / count) ** 0.5,
            "loss": float(sums["loss"]) / count,
        }

    def predictions(self, output: Tensor, target: Target) -> Tensor:
        """The network's output [B, 1] in the label's unit, [B]."""
        middle, half = scale(target)
        return output.squeeze(1) * half + middle


def scale(target: Target) -> tuple[float, float]:
    """Middle and half width of the public label range, by which every site scales its labels alike."""
    if target.label_range is None or not target.label_range[0] < target.label_range[1]:
        raise BadInput(
            f"task.name: regression needs a public range of labels, and the data's is {target.label_range}; "
            "choose a source that declares the lowest and the highest possible label"
        )
    low, high = target.label_range
    return (low + high) / 2, (high - low) / 2
