"""Tests between models: paired over seeds, folds or sites, McNemar's on the same cases, Holm's correction."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from polyclinic.errors import BadInput
from polyclinic.metrics.roc import CONFIDENCE
from polyclinic.metrics.statistics.checks import Numbers, numbers, same_length, truths
from polyclinic.metrics.statistics.intervals import mean_deviation, mean_interval

PairedTest = Literal["t", "wilcoxon"]
#: pairs up to which all changes of sign are counted where differences are tied: 2 ** 12 of them
MOST_COUNTED = 12
#: pairs up to which scipy counts all changes of sign where no differences are tied
MOST_UNTIED = 50
#: cases that only one of two models gets right, up to which McNemar's test is exact
MOST_EXACT = 25


@dataclass(frozen=True)
class Difference:
    """Mean difference of n pairs, value minus baseline, with its interval (Student's t) and p value (two-sided).

    `p_holm` is p corrected for the number of methods compared with the baseline.
    """

    difference: float
    low: float
    high: float
    p: float
    p_holm: float
    n: int


def paired_test(
    values: Numbers,
    baseline: Numbers,
    *,
    test: PairedTest = "t",
    overlap: float = 0.0,
    confidence: float = CONFIDENCE,
) -> Difference:
    """Compare two methods by pairs: values [N] and those of the baseline [N], of the same seed, fold or site.

    `test`: "t" is Student's paired test; "wilcoxon" the signed-rank test, exact for few pairs. The interval is
    Student's with both. `overlap`: as in `mean_interval`, for the folds of a cross-validation, with "t" only.
    """
    ours, theirs = numbers(values, "values", least=2), numbers(baseline, "baseline", least=2)
    same_length(theirs, "baseline", len(ours))
    if overlap and test == "wilcoxon":
        raise BadInput("statistics: the Wilcoxon test knows no correction for overlapping folds; choose t")
    apart = ours - theirs
    interval = mean_interval(apart, confidence=confidence, overlap=overlap)
    p = _t_test(apart, overlap) if test == "t" else _wilcoxon(apart)
    return Difference(interval.value, interval.low, interval.high, p, p, len(apart))


def _t_test(apart: np.ndarray, overlap: float) -> float:
    """p of the mean of differences [N] being zero.

    Where all are equal they have no spread, and t is not defined: p is that of the exact sign test then.
    """
    from scipy import stats

    deviation = mean_deviation(apart, overlap)
    if deviation == 0:
        return 1.0 if apart[0] == 0 else 2.0 ** (1 - len(apart))
    return float(2 * stats.t.sf(abs(apart.mean()) / deviation, len(apart) - 1))


def _wilcoxon(apart: np.ndarray) -> float:
    """p of the signed-rank test; differences of zero are left out, as Wilcoxon does."""
    from scipy import stats

    apart = apart[apart != 0]
    if len(apart) == 0:
        return 1.0
    untied = len(np.unique(np.abs(apart))) == len(apart)
    if untied and len(apart) <= MOST_UNTIED:
        return float(stats.wilcoxon(apart, method="exact").pvalue)
    if len(apart) <= MOST_COUNTED:
        return _all_signs(stats.rankdata(np.abs(apart)), apart > 0)
    return float(stats.wilcoxon(apart, method="asymptotic").pvalue)


def _all_signs(ranks: np.ndarray, positive: np.ndarray) -> float:
    """Exact p with tied ranks [N]: the share of all 2^N changes of sign whose rank sum lies as far out."""
    signs = (np.arange(2 ** len(ranks))[:, None] >> np.arange(len(ranks))) & 1
    centre = ranks.sum() / 2
    distance = np.abs(signs @ ranks - centre)
    return float((distance >= abs(ranks[positive].sum() - centre) - 1e-9).mean())


def compare_with_baseline(
    values: Mapping[str, Mapping[Hashable, float]],
    baseline: str,
    *,
    test: PairedTest = "t",
    overlap: float = 0.0,
    confidence: float = CONFIDENCE,
) -> dict[str, Difference]:
    """Each of several methods against one of them, `baseline`, by pairs (see `paired_test`), with Holm's correction.

    `values[method]` are its values by seed, fold or site; a pair are two values of the same key. A method with fewer
    than two pairs is left out.
    """
    if baseline not in values:
        raise BadInput(f"statistics: baseline '{baseline}' is not among {', '.join(values)}")
    theirs, found = values[baseline], {}
    for name, ours in values.items():
        keys = [key for key in ours if key in theirs]
        if name != baseline and len(keys) > 1:
            pair = [ours[key] for key in keys], [theirs[key] for key in keys]
            found[name] = paired_test(*pair, test=test, overlap=overlap, confidence=confidence)
    corrected = holm([one.p for one in found.values()])
    return {name: replace(one, p_holm=p) for (name, one), p in zip(found.items(), corrected, strict=True)}


def holm(p_values: Sequence[float]) -> list[float]:
    """p values corrected for their number, so that any false discovery is as unlikely as in one test (Holm 1979)."""
    if not len(p_values):
        return []
    found = numbers(list(p_values), "p_values")
    if (found < 0).any() or (found > 1).any():
        raise BadInput("statistics: p_values must lie between 0 and 1")
    order = np.argsort(found, kind="stable")
    raised = np.minimum(1, np.maximum.accumulate(found[order] * np.arange(len(found), 0, -1)))
    corrected = np.empty_like(raised)
    corrected[order] = raised
    return corrected.tolist()


def mcnemar(first: Numbers, second: Numbers, *, exact: bool | None = None, correction: bool = True) -> float:
    """p of McNemar's test that two models are right equally often, from whether each was right on each case [N].

    `exact`: the binomial test, by default where 25 cases or fewer are right in one model only; else chi-squared with
    one degree of freedom, with `correction` for continuity (Edwards 1948).
    """
    from scipy import stats

    ours = truths(first, "first", len(np.asarray(first)))
    theirs = truths(second, "second", len(ours))
    only_ours, only_theirs = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
    apart = only_ours + only_theirs
    if apart == 0:
        return 1.0
    if exact is None:
        exact = apart <= MOST_EXACT
    if exact:
        return float(stats.binomtest(only_ours, apart).pvalue)
    return float(stats.chi2.sf(max(0, abs(only_ours - only_theirs) - correction) ** 2 / apart, 1))
