"""Operating points: sensitivity at a chosen specificity, and what a positive or negative result then means."""

from __future__ import annotations

from dataclasses import dataclass

from polyclinic.errors import BadInput
from polyclinic.metrics.roc import CONFIDENCE, share_interval, threshold
from polyclinic.metrics.statistics.checks import Numbers, numbers, share, truths
from polyclinic.metrics.statistics.intervals import Interval


@dataclass(frozen=True)
class OperatingPoint:
    """A case is called positive if its score lies above `threshold`. Intervals are exact (Clopper-Pearson); they take
    the threshold as given."""

    threshold: float
    sensitivity: Interval
    specificity: Interval


def sensitivity_at_specificity(
    scores: Numbers, truth: Numbers, specificity: float = 0.95, *, confidence: float = CONFIDENCE
) -> OperatingPoint:
    """The lowest threshold with at least this specificity, from scores [N] and truth [N], 1 or 0."""
    found = numbers(scores, "scores")
    positive = truths(truth, "truth", len(found))
    if positive.all() or not positive.any():
        raise BadInput("statistics: truth must have positive and negative cases")
    cut = threshold(found[~positive], 1 - share(specificity, "specificity"))
    called = found > cut
    return OperatingPoint(
        cut,
        _share(int(called[positive].sum()), int(positive.sum()), confidence),
        _share(int((~called[~positive]).sum()), int((~positive).sum()), confidence),
    )


def _share(count: int, total: int, confidence: float) -> Interval:
    return Interval(count / total, *share_interval(count, total, share(confidence, "confidence")), confidence)


def predictive_values(sensitivity: float, specificity: float, prevalence: float) -> tuple[float, float]:
    """Positive and negative predictive value (PPV, NPV) where this share of all patients has the disease.

    NaN where no result of that kind ever comes.
    """
    for name, value in (("sensitivity", sensitivity), ("specificity", specificity), ("prevalence", prevalence)):
        if not 0 <= value <= 1:
            raise BadInput(f"statistics: {name} is {value}; choose a number from 0 to 1")
    true_positives, missed = sensitivity * prevalence, (1 - sensitivity) * prevalence
    true_negatives, false_alarms = specificity * (1 - prevalence), (1 - specificity) * (1 - prevalence)
    return _ratio(true_positives, true_positives + false_alarms), _ratio(true_negatives, true_negatives + missed)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else float("nan")
