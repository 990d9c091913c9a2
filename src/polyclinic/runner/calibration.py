"""What validation images say about a released model: its temperature, conformal quantiles and thresholds.

They are fitted where the validation images are, and kept in the model's card. All thresholds and sets are of calibrated
probabilities. The same images may have chosen the released round: figures on new patients are a little worse.
"""

from __future__ import annotations

import math

import numpy as np
from pydantic import Field
from torch import Tensor

from polyclinic.metrics.statistics import (
    ConformalIntervals,
    ConformalSets,
    apply_temperature,
    fit_temperature,
    sensitivity_at_specificity,
)
from polyclinic.settings import Settings
from polyclinic.tasks import Target, Task

COVERAGES = (0.8, 0.9, 0.95)
SPECIFICITIES = (0.9, 0.95)
#: images without which a temperature says more about chance than about the model
LEAST_CASES = 10
DIGITS = 6  # significant digits that are kept: the last bits differ between machines


class Calibration(Settings):
    """What is fitted on validation images. Keys of the tables are shares as text: "0.9"."""

    cases: int = Field(ge=1, description="patients of the validation images, or images where patients are not known")
    temperature: float | None = Field(None, gt=0, description="the network's outputs are divided by it; classification")
    quantiles: dict[str, float] = Field(
        {}, description="by coverage: of conformal scores (classification), or how far intervals reach (regression)"
    )
    thresholds: dict[str, float] = Field(
        {}, description="two classes, by specificity: a probability of the second class above it is called positive"
    )

    def sets(self, probabilities: np.ndarray, coverage: float) -> np.ndarray | None:
        """The conformal set of each case, bool [N, C], of calibrated probabilities; None where there is none."""
        quantile = self.quantiles.get(share_key(coverage))
        if quantile is None or self.temperature is None:
            return None
        return ConformalSets(quantile, "adaptive", coverage).sets(probabilities)

    def reach(self, coverage: float) -> float | None:
        """How far an interval reaches to both sides of a predicted value."""
        return None if self.temperature is not None else self.quantiles.get(share_key(coverage))


def share_key(share: float) -> str:
    return f"{share:g}"


def calibrate(
    task: Task, target: Target, outputs: Tensor | np.ndarray, labels: Tensor | np.ndarray, cases: np.ndarray | None
) -> Calibration | None:
    """From the network's outputs for validation images [N, d], and their labels [N]; `cases` [N] says which images are
    of one patient. None where there is nothing to fit: masks, too few images, outputs that are not finite."""
    found, truth = np.asarray(outputs, np.float64), np.asarray(labels)
    first = np.arange(len(found)) if cases is None else np.unique(np.asarray(cases), return_index=True)[1]
    if task.dense or len(first) < LEAST_CASES or not np.isfinite(found).all():
        return None
    if task.like == "classification":
        return _of_classes(found, truth.astype(np.int64), first)
    return _of_values(task, target, found, truth, first)


def _of_classes(logits: np.ndarray, labels: np.ndarray, first: np.ndarray) -> Calibration:
    temperature = _rounded(fit_temperature(logits, labels))
    probabilities = apply_temperature(logits, temperature)
    quantiles = {
        share_key(share): ConformalSets.fit(probabilities[first], labels[first], coverage=share).quantile
        for share in COVERAGES
    }
    return Calibration(
        cases=len(first),
        temperature=temperature,
        quantiles=_finite(quantiles),
        thresholds=_thresholds(probabilities, labels),
    )


def _thresholds(probabilities: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """By specificity, of two classes that are both there."""
    if probabilities.shape[1] != 2 or len(np.unique(labels)) != 2:
        return {}
    points = {share: sensitivity_at_specificity(probabilities[:, 1], labels, share) for share in SPECIFICITIES}
    return _finite({share_key(share): point.threshold for share, point in points.items()})


def _of_values(
    task: Task, target: Target, outputs: np.ndarray, labels: np.ndarray, first: np.ndarray
) -> Calibration | None:
    import torch

    values = task.predictions(torch.from_numpy(outputs), target).numpy()
    reaches = {
        share_key(share): ConformalIntervals.fit(values[first], labels[first], coverage=share).reach
        for share in COVERAGES
    }
    return Calibration(cases=len(first), quantiles=_finite(reaches))


def _finite(values: dict[str, float]) -> dict[str, float]:
    """Without those that so few cases cannot give; rounded up, so that the coverage or specificity holds."""
    return {name: _rounded_up(value) for name, value in values.items() if math.isfinite(value)}


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _rounded_up(value: float) -> float:
    nearest = _rounded(value)
    return nearest if nearest >= value else _rounded(value + abs(value) * 10.0 ** (1 - DIGITS))
