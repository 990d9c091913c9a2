"""Confidence intervals: of a mean over seeds (Student's t), of a metric by a bootstrap over patients, of agreement."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from torch import Tensor

from polyclinic.errors import BadInput
from polyclinic.metrics.roc import CONFIDENCE
from polyclinic.randomness import numpy_rng

# --- checks of what the functions of this package are given ---------------------------------------------------


Numbers = Tensor | np.ndarray | list[float] | tuple[float, ...]


def numbers(values: Numbers, name: str, *, least: int = 1) -> np.ndarray:
    """Values as float64 [N], N being `least` or more, all finite."""
    found = np.asarray(values, dtype=np.float64)
    if found.ndim != 1 or len(found) < least:
        raise BadInput(f"statistics: {name} has shape {found.shape}; give a list of {least} or more numbers")
    if not np.isfinite(found).all():
        raise BadInput(f"statistics: {name} has values that are not finite numbers; leave those cases out")
    return found


def truths(values: Numbers, name: str, cases: int) -> np.ndarray:
    """Zeros and ones, or False and True, as bool [cases]."""
    found = numbers(values, name)
    same_length(found, name, cases)
    if not np.isin(found, (0, 1)).all():
        raise BadInput(f"statistics: {name} must be 0 or 1 for each case")
    return found.astype(bool)


def same_length(values: np.ndarray, name: str, cases: int) -> None:
    if len(values) != cases:
        raise BadInput(f"statistics: {name} has {len(values)} values for {cases} cases; give one for each case")


def class_probabilities(probabilities: Numbers, labels: Numbers | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities float64 [N, C] and labels int64 [N] (empty where none are given).

    Probabilities [N] are those of the second of two classes.
    """
    found = np.asarray(probabilities, dtype=np.float64)
    if found.ndim == 1:
        found = np.stack([1 - found, found], axis=1)
    if found.ndim != 2 or found.shape[1] < 2 or len(found) == 0:
        raise BadInput(f"statistics: probabilities have shape {found.shape}; give [cases, classes]")
    # NaN fails the first comparison; single precision adds up to 1 within a few millionths
    if not (found >= -1e-6).all() or not np.allclose(found.sum(1), 1, atol=1e-4):
        raise BadInput("statistics: the probabilities of each case must be 0 or more and add up to 1")
    return found, np.empty(0, np.int64) if labels is None else class_numbers(labels, *found.shape)


def class_numbers(labels: Numbers, cases: int, classes: int) -> np.ndarray:
    """Labels as int64 [cases], each from 0 to classes - 1."""
    found = numbers(labels, "labels")
    same_length(found, "labels", cases)
    whole = found.astype(np.int64)
    if (whole != found).any() or whole.min() < 0 or whole.max() >= classes:
        raise BadInput(f"statistics: labels must be whole numbers from 0 to {classes - 1}")
    return whole


def share(value: float, name: str) -> float:
    """A number strictly between 0 and 1."""
    if not 0 < value < 1:
        raise BadInput(f"statistics: {name} is {value}; choose a number between 0 and 1")
    return float(value)


# --- intervals ------------------------------------------------------------------------------------------------


DRAWS = 2000
#: weights of draws in memory at once
CELLS = 4_000_000

WeightedMetrics = Callable[[np.ndarray], Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class Interval:
    """An estimate and the ends of its confidence interval."""

    value: float
    low: float
    high: float
    confidence: float = CONFIDENCE

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_interval(values: Numbers, *, confidence: float = CONFIDENCE, overlap: float = 0.0) -> Interval:
    """The mean of two or more values, as of several seeds, with the interval of Student's t.

    `overlap` is for cross-validation, whose training images overlap: test images divided by training images, which is
    1 / (folds - 1). The variance of the mean is then (1/n + overlap) times that of the values (Nadeau and Bengio 2003).
    """
    from scipy import stats

    found = numbers(values, "values", least=2)
    reach = stats.t.ppf((1 + share(confidence, "confidence")) / 2, len(found) - 1) * mean_deviation(found, overlap)
    mean = float(found.mean())
    return Interval(mean, float(mean - reach), float(mean + reach), confidence)


def mean_deviation(values: np.ndarray, overlap: float = 0.0) -> float:
    """The standard error of the mean of values [N]; 0 where all are equal but for rounding."""
    if np.ptp(values) <= 1e-12 * np.abs(values).max():
        return 0.0
    return float(np.sqrt((1 / len(values) + overlap) * values.var(ddof=1)))


def bootstrap_interval(
    metric: Callable[[np.ndarray], float],
    cases: int,
    *,
    patients: Sequence[Hashable] | np.ndarray | None = None,
    address: Sequence[str | int] = ("statistics", "bootstrap"),
    draws: int = DRAWS,
    kind: Literal["bca", "percentile"] = "bca",
    confidence: float = CONFIDENCE,
) -> Interval:
    """The bootstrap interval of one metric; see `bootstrap_intervals`."""
    found = bootstrap_intervals(
        lambda rows: {"metric": metric(rows)},
        cases,
        patients=patients,
        address=address,
        draws=draws,
        kind=kind,
        confidence=confidence,
    )
    if not found:
        raise BadInput("statistics: the metric is not defined on these cases; give more cases, of every class")
    return found["metric"]


def bootstrap_intervals(
    metrics: Callable[[np.ndarray], Mapping[str, float]],
    cases: int,
    *,
    patients: Sequence[Hashable] | np.ndarray | None = None,
    address: Sequence[str | int] = ("statistics", "bootstrap"),
    draws: int = DRAWS,
    kind: Literal["bca", "percentile"] = "bca",
    confidence: float = CONFIDENCE,
) -> dict[str, Interval]:
    """Bootstrap intervals of several metrics of the same cases, from the same draws.

    `metrics(rows)` gives the metrics of the cases with the numbers `rows` (int64, some several times), out of 0 to
    `cases` - 1. Whole patients are drawn with replacement; without `patients` every case is a patient of its own.
    `address` names the random draws: the same address gives the same interval. `kind`: "bca", corrected for bias and
    for skewness (Efron 1987), or "percentile". A draw on which a metric is NaN or missing, as an AUC without positive
    cases is, does not count for it; a metric that fails on half of the draws has no interval and is left out.
    """
    share(confidence, "confidence")
    if cases < 2 or draws < 2:
        raise BadInput("statistics: a bootstrap needs two cases and two draws or more")
    groups = rows_by_patient(patients, cases)
    picks = _picks(len(groups), draws, address)
    drawn = [metrics(np.concatenate([groups[i] for i in pick])) for pick in picks]
    left_out = [metrics(np.concatenate([*groups[:i], *groups[i + 1 :]])) for i in _needed(kind, len(groups))]
    return _intervals(metrics(np.arange(cases)), _columns(drawn), _columns(left_out), confidence)


def weighted_bootstrap(
    metrics: WeightedMetrics,
    cases: int,
    *,
    patients: Sequence[Hashable] | np.ndarray | None = None,
    address: Sequence[str | int] = ("statistics", "bootstrap"),
    draws: int = DRAWS,
    kind: Literal["bca", "percentile"] = "bca",
    confidence: float = CONFIDENCE,
) -> dict[str, Interval]:
    """The same intervals as `bootstrap_intervals`, hundreds of times faster, of metrics that know weights.

    `metrics(weights)` gives each metric of all draws at once, {name: [D]}, from weights [D, cases]: how often each draw
    has each case (`metrics.statistics.case_metrics`).
    """
    share(confidence, "confidence")
    if cases < 2 or draws < 2:
        raise BadInput("statistics: a bootstrap needs two cases and two draws or more")
    groups = rows_by_patient(patients, cases)
    picks = _picks(len(groups), draws, address)
    member = np.empty(cases, dtype=np.int64)
    for number, rows in enumerate(groups):
        member[rows] = number

    def weights_of(few: np.ndarray) -> np.ndarray:
        return np.stack([np.bincount(pick, minlength=len(groups)) for pick in few])[:, member].astype(np.float64)

    def without(few: np.ndarray) -> np.ndarray:
        return (few[:, None] != member).astype(np.float64)

    whole = {name: float(values[0]) for name, values in metrics(np.ones((1, cases))).items()}
    drawn = _in_pieces(metrics, weights_of, picks, cases)
    left_out = _in_pieces(metrics, without, np.array(_needed(kind, len(groups))), cases)
    return _intervals(whole, drawn, left_out, confidence)


def _in_pieces(
    metrics: WeightedMetrics, weights_of: Callable[[np.ndarray], np.ndarray], draws: np.ndarray, cases: int
) -> dict[str, np.ndarray]:
    """Metrics of all draws, so many at a time that their weights fit in memory."""
    step = max(1, CELLS // cases)
    found = [metrics(weights_of(draws[start : start + step])) for start in range(0, len(draws), step)]
    names = found[0] if found else {}
    return {name: np.concatenate([one[name] for one in found]) for name in names}


def _picks(patients: int, draws: int, address: Sequence[str | int]) -> np.ndarray:
    """The patients of each draw, int64 [draws, patients]."""
    if patients < 2:
        raise BadInput("statistics: all cases are of one patient; a bootstrap by patient needs two or more")
    return numpy_rng(*address).integers(0, patients, (draws, patients))


def _columns(found: list[Mapping[str, float]]) -> dict[str, np.ndarray]:
    """The values of each metric, NaN where one has none."""
    names = dict.fromkeys(name for one in found for name in one)
    return {name: np.array([one.get(name, np.nan) for one in found], dtype=np.float64) for name in names}


def _intervals(
    whole: Mapping[str, float],
    drawn: Mapping[str, np.ndarray],
    left_out: Mapping[str, np.ndarray],
    confidence: float,
) -> dict[str, Interval]:
    found = {}
    for name, value in whole.items():
        values = drawn[name][np.isfinite(drawn[name])] if name in drawn else np.empty(0)
        if np.isfinite(value) and len(values) * 2 > len(drawn.get(name, ())):
            others = left_out.get(name, np.empty(0))
            low, high = _ends(value, values, others[np.isfinite(others)], confidence)
            found[name] = Interval(float(value), low, high, confidence)
    return found


def rows_by_patient(patients: Sequence[Hashable] | np.ndarray | None, cases: int) -> list[np.ndarray]:
    """The numbers of the cases of each patient, patients in the order in which they first come."""
    if patients is None:
        return list(np.arange(cases)[:, None])
    same_length(np.asarray(patients), "patients", cases)
    rows: dict[Hashable, list[int]] = {}
    for row, patient in enumerate(np.asarray(patients).tolist()):
        rows.setdefault(patient, []).append(row)
    return [np.array(mine) for mine in rows.values()]


def _needed(kind: str, patients: int) -> range:
    """The patients to leave out in turn (jackknife), for the skewness."""
    if kind not in ("bca", "percentile"):
        raise BadInput(f"statistics: no such bootstrap: '{kind}'; choose bca or percentile")
    return range(patients if kind == "bca" else 0)


def _ends(value: float, values: np.ndarray, left_out: np.ndarray, confidence: float) -> tuple[float, float]:
    """The ends of the interval: quantiles of the drawn values; BCa where there are values with one patient left out."""
    normal = NormalDist()  # not scipy's, which takes longer to import than many a run's statistics
    tails = np.array([(1 - confidence) / 2, (1 + confidence) / 2])
    # a draw equal to the value counts half, so that a metric of few steps has no bias of its own
    below = ((values < value).sum() + (values <= value).sum()) / (2 * len(values))
    if len(left_out) and 0 < below < 1:
        bias = normal.inv_cdf(float(below))
        apart = left_out.mean() - left_out
        spread = (apart**2).sum() ** 1.5
        skewness = (apart**3).sum() / (6 * spread) if spread > 0 else 0.0
        moved = bias + np.array([normal.inv_cdf(tail) for tail in tails])
        tails = np.array([normal.cdf(place) for place in bias + moved / (1 - skewness * moved)])
    low, high = np.quantile(values, tails)
    return float(low), float(high)


# --- agreement ------------------------------------------------------------------------------------------------


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
