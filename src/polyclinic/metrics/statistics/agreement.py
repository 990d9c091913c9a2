"""Agreement of predicted values with the truth: Bland and Altman's bias and limits of agreement."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from polyclinic.metrics.roc import CONFIDENCE
from polyclinic.metrics.statistics.checks import Numbers, numbers, same_length, share
from polyclinic.metrics.statistics.intervals import Interval, mean_interval


@dataclass(frozen=True)
class Agreement:
    """`bias` is the mean difference; between `lower` and `upper` lie 95 % of the differences, if they are normal."""

    bias: Interval
    deviation: float
    lower: Interval
    upper: Interval
    n: int


def bland_altman(predictions: Numbers, truth: Numbers, *, confidence: float = CONFIDENCE) -> Agreement:
    """Differences of predictions [N] and true values [N]: bias, standard deviation, limits, with intervals.

    The limits lie 1.96 standard deviations from the bias. The variance of a limit is s^2 (1/n + 1.96^2 / 2(n-1)), and
    its interval is Student's (Bland and Altman 1999). Differences count as independent: one of each patient.
    """
    from scipy import stats

    found, values = numbers(predictions, "predictions", least=2), numbers(truth, "truth", least=2)
    same_length(values, "truth", len(found))
    apart, n = found - values, len(found)
    bias, deviation = mean_interval(apart, confidence=confidence), float(apart.std(ddof=1))
    width = float(stats.norm.ppf(0.975))
    quantile = stats.t.ppf((1 + share(confidence, "confidence")) / 2, n - 1)
    reach = float(quantile * deviation * np.sqrt(1 / n + width**2 / (2 * (n - 1))))
    lower, upper = (
        Interval(limit, limit - reach, limit + reach, confidence)
        for limit in (bias.value - width * deviation, bias.value + width * deviation)
    )
    return Agreement(bias, deviation, lower, upper, n)
