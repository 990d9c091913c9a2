"""Confidence intervals: of a mean over seeds (Student's t), of metrics by a bootstrap over patients, of agreement.

Metrics of weighted cases (`classification_metrics`, ...) are of many draws at once, so that a bootstrap of hundreds of
draws takes milliseconds. Each takes what is known of N cases and gives a function of weights [D, N] (how often each of
D draws has each case), which gives each metric of every draw, {name: [D]}; NaN where a draw does not define it. With
weights of 1 they are the metrics of the cases themselves.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
import scipy  # its parts are imported when they are named: some take seconds
from torch import Tensor

from polyclinic.errors import BadInput
from polyclinic.metrics.roc import CONFIDENCE, aucs_from_counts
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
    found = numbers(values, "values", least=2)
    quantile = scipy.stats.t.ppf((1 + share(confidence, "confidence")) / 2, len(found) - 1)
    reach = quantile * mean_deviation(found, overlap)
    mean = float(found.mean())
    return Interval(mean, float(mean - reach), float(mean + reach), confidence)


def mean_deviation(values: np.ndarray, overlap: float = 0.0) -> float:
    """The standard error of the mean of values [N]; 0 where all are equal but for rounding."""
    if np.ptp(values) <= 1e-12 * np.abs(values).max():
        return 0.0
    return float(np.sqrt((1 / len(values) + overlap) * values.var(ddof=1)))


def weighted_bootstrap(
    metrics: WeightedMetrics,
    cases: int,
    *,
    patients: Sequence[Hashable] | np.ndarray | None = None,
    address: Sequence[str | int] = ("statistics", "bootstrap"),
    draws: int = DRAWS,
    kind: Literal["bca", "percentile"] = "bca",
) -> dict[str, Interval]:
    """Bootstrap intervals (95 %) of several metrics of the same cases, from the same draws.

    `metrics(weights)` gives each metric of all draws at once, {name: [D]}, from weights [D, cases]: how often each draw
    has each case, as `classification_metrics` does. Whole patients are drawn with replacement; without `patients`
    every case is a patient of its own. `address` names the random draws: the same address gives the same interval.
    `kind`: "bca", corrected for bias and for skewness (Efron 1987), or "percentile". A draw on which a metric is NaN,
    as an AUC without positive cases is, does not count for it; a metric that fails on half of the draws has no interval
    and is left out.
    """
    if cases < 2 or draws < 2:
        raise BadInput("statistics: a bootstrap needs two cases and two draws or more")
    if kind not in ("bca", "percentile"):
        raise BadInput(f"statistics: no such bootstrap: '{kind}'; choose bca or percentile")
    groups = rows_by_patient(patients, cases)
    if len(groups) < 2:
        raise BadInput("statistics: all cases are of one patient; a bootstrap by patient needs two or more")
    picks = numpy_rng(*address).integers(0, len(groups), (draws, len(groups)))
    member = np.empty(cases, dtype=np.int64)
    for number, rows in enumerate(groups):
        member[rows] = number

    def weights_of(few: np.ndarray) -> np.ndarray:
        return np.stack([np.bincount(pick, minlength=len(groups)) for pick in few])[:, member].astype(np.float64)

    def without(few: np.ndarray) -> np.ndarray:
        return (few[:, None] != member).astype(np.float64)

    drawn = _in_pieces(metrics, weights_of, picks, cases)
    # each patient left out in turn (jackknife), for the skewness
    left_out = _in_pieces(metrics, without, np.arange(len(groups) if kind == "bca" else 0), cases)
    found = {}
    for name, (value,) in metrics(np.ones((1, cases))).items():
        values, others = (some.get(name, np.empty(0)) for some in (drawn, left_out))
        known = values[np.isfinite(values)]
        if np.isfinite(value) and len(known) * 2 > len(values):
            found[name] = Interval(float(value), *_ends(float(value), known, others[np.isfinite(others)]))
    return found


def _in_pieces(
    metrics: WeightedMetrics, weights_of: Callable[[np.ndarray], np.ndarray], draws: np.ndarray, cases: int
) -> dict[str, np.ndarray]:
    """Metrics of all draws, so many at a time that their weights fit in memory."""
    step = max(1, CELLS // cases)
    found = [metrics(weights_of(draws[start : start + step])) for start in range(0, len(draws), step)]
    names = found[0] if found else {}
    return {name: np.concatenate([one[name] for one in found]) for name in names}


def rows_by_patient(patients: Sequence[Hashable] | np.ndarray | None, cases: int) -> list[np.ndarray]:
    """The numbers of the cases of each patient, patients in the order in which they first come."""
    if patients is None:
        return list(np.arange(cases)[:, None])
    same_length(np.asarray(patients), "patients", cases)
    rows: dict[Hashable, list[int]] = {}
    for row, patient in enumerate(np.asarray(patients).tolist()):
        rows.setdefault(patient, []).append(row)
    return [np.array(mine) for mine in rows.values()]


def _ends(value: float, values: np.ndarray, left_out: np.ndarray) -> tuple[float, float]:
    """The ends of the interval: quantiles of the drawn values; BCa where there are values with one patient left out."""
    normal = NormalDist()  # not scipy's, which takes longer to import than many a run's statistics
    tails = np.array([(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
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


def bland_altman(predictions: Numbers, truth: Numbers) -> Agreement:
    """Differences of predictions [N] and true values [N]: bias, standard deviation, limits, with intervals.

    The limits lie 1.96 standard deviations from the bias. The variance of a limit is s^2 (1/n + 1.96^2 / 2(n-1)), and
    its interval is Student's (Bland and Altman 1999). Differences count as independent: one of each patient.
    """
    found, values = numbers(predictions, "predictions", least=2), numbers(truth, "truth", least=2)
    same_length(values, "truth", len(found))
    apart, n = found - values, len(found)
    bias, deviation = mean_interval(apart), float(apart.std(ddof=1))
    width = float(scipy.stats.norm.ppf(0.975))
    quantile = scipy.stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)
    reach = float(quantile * deviation * np.sqrt(1 / n + width**2 / (2 * (n - 1))))
    lower, upper = (
        Interval(limit, limit - reach, limit + reach)
        for limit in (bias.value - width * deviation, bias.value + width * deviation)
    )
    return Agreement(bias, deviation, lower, upper, n)


BINS = 15  #: of the calibration error, as in Guo et al. 2017


def equal_width_bins(values: np.ndarray, bins: int) -> np.ndarray:
    """The bin of each value [N] from 0 to 1, of so many of equal width."""
    return np.clip(np.ceil(values * bins).astype(np.int64) - 1, 0, bins - 1)


# --- metrics of weighted cases ---------------------------------------------------------------------------------


def classification_metrics(probabilities: Numbers, labels: Numbers, scores: Numbers) -> WeightedMetrics:
    """accuracy, balanced_accuracy, auc, loss, calibration_error and brier, from probabilities [N, C] and labels [N].

    `scores` [N, C] rank the cases for the AUC, as the classes' margins do; of two classes the second counts, of more
    each against all others. The Brier score of two classes is that of the second, between 0 and 1.
    """
    found, classes = class_probabilities(probabilities, labels)
    right = (found.argmax(1) == classes).astype(np.float64)
    own = np.eye(found.shape[1], dtype=np.float64)[classes]
    rows, binary = np.arange(len(classes)), found.shape[1] == 2
    loss = -np.log(np.clip(found[rows, classes], 1e-300, None))
    squares = ((found - own) ** 2)[:, 1:].sum(1) if binary else ((found - own) ** 2).sum(1)
    ranks = [Ranks(np.asarray(scores)[:, c], own[:, c]) for c in (range(1, 2) if binary else range(found.shape[1]))]
    place = equal_width_bins(found.max(1), BINS)
    gaps = np.zeros((len(right), BINS))  # in the column of their bin
    gaps[rows, place] = found.max(1) - right
    gaps = gaps[:, np.bincount(place, minlength=BINS) > 0]
    present = own[:, own.any(0)]

    def metrics(weights: np.ndarray) -> dict[str, np.ndarray]:
        total = weights.sum(1)
        areas = np.stack([rank.auc(weights) for rank in ranks], 1)
        defined = [one for one in areas.T if not np.isnan(one).all()]
        return {
            "accuracy": weights @ right / total,
            "balanced_accuracy": _ratio(weights @ (present * right[:, None]), weights @ present).mean(1),
            "loss": weights @ loss / total, "brier": weights @ squares / total,
            "calibration_error": np.abs(weights @ gaps).sum(1) / total,
            **({"auc": np.stack(defined, 1).mean(1)} if defined else {}),
        }  # fmt: skip

    return metrics


def regression_metrics(predictions: Numbers, labels: Numbers) -> WeightedMetrics:
    """mae, rmse and bias (the mean of predicted minus true), from values [N] in the label's unit."""
    found, truth = numbers(predictions, "predictions"), numbers(labels, "labels")
    same_length(truth, "labels", len(found))
    errors = found - truth

    def metrics(weights: np.ndarray) -> dict[str, np.ndarray]:
        total = weights.sum(1)
        return {
            "mae": weights @ np.abs(errors) / total,
            "rmse": np.sqrt(weights @ errors**2 / total),
            "bias": weights @ errors / total,
        }

    return metrics


def mean_metrics(values: dict[str, np.ndarray]) -> WeightedMetrics:
    """The mean of each named value [N] over the cases that have one (NaN is none), such as Dice of each patient."""
    known = {name: ~np.isnan(found) for name, found in values.items()}

    def metrics(weights: np.ndarray) -> dict[str, np.ndarray]:
        return {
            name: _ratio(weights @ np.where(known[name], found, 0.0), weights @ known[name].astype(np.float64))
            for name, found in values.items()
        }

    return metrics


class Ranks:
    """The AUC of scores [N] for truth [N], 0 or 1, under weights; ties count half."""

    def __init__(self, scores: np.ndarray, truth: np.ndarray) -> None:
        self.order = np.argsort(scores, kind="stable")
        ordered = np.asarray(scores, dtype=np.float64)[self.order]
        #: where a new score begins
        self.starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
        self.truth = np.asarray(truth, dtype=np.float64)[self.order]

    def auc(self, weights: np.ndarray) -> np.ndarray:
        """[D] of weights [D, N]; NaN for a draw without positive or without negative cases."""
        ordered = weights[:, self.order]
        own = np.add.reduceat(ordered * self.truth, self.starts, axis=1)
        rest = np.add.reduceat(ordered * (1 - self.truth), self.starts, axis=1)
        return aucs_from_counts(own, rest)


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """part / whole, NaN where whole is 0."""
    return np.divide(part, whole, out=np.full(np.shape(part), np.nan), where=whole > 0)
