"""Tests between models: paired over seeds, folds or sites; McNemar's and DeLong's on the same cases; Holm's rule.

Exact permutation tests over patients: under the null hypothesis members and held-out patients are exchangeable. Nothing
is assumed about the scores. Images of one patient stand together: patients are exchanged, and not images.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import scipy  # its parts are imported when they are named: some take seconds
from torch import Tensor

from polyclinic.errors import BadInput
from polyclinic.metrics.roc import CONFIDENCE, auc, auc_interval, placements
from polyclinic.metrics.statistics.intervals import (
    Interval,
    Numbers,
    mean_deviation,
    mean_interval,
    numbers,
    same_length,
    truths,
)

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


def paired_test(values: Numbers, baseline: Numbers, *, test: PairedTest = "t", overlap: float = 0.0) -> Difference:
    """Compare two methods by pairs: values [N] and those of the baseline [N], of the same seed, fold or site.

    `test`: "t" is Student's paired test; "wilcoxon" the signed-rank test, exact for few pairs. The interval is
    Student's with both. `overlap`: as in `mean_interval`, for the folds of a cross-validation, with "t" only.
    """
    ours, theirs = numbers(values, "values", least=2), numbers(baseline, "baseline", least=2)
    same_length(theirs, "baseline", len(ours))
    if overlap and test == "wilcoxon":
        raise BadInput("statistics: the Wilcoxon test knows no correction for overlapping folds; choose t")
    apart = ours - theirs
    interval = mean_interval(apart, overlap=overlap)
    if test == "wilcoxon":
        p = _wilcoxon(apart)
    elif deviation := mean_deviation(apart, overlap):
        p = float(2 * scipy.stats.t.sf(abs(apart.mean()) / deviation, len(apart) - 1))
    else:  # all are equal and have no spread: t is not defined, and p is that of the exact sign test
        p = 1.0 if apart[0] == 0 else 2.0 ** (1 - len(apart))
    return Difference(interval.value, interval.low, interval.high, p, p, len(apart))


def _wilcoxon(apart: np.ndarray) -> float:
    """p of the signed-rank test; differences of zero are left out, as Wilcoxon does."""
    apart = apart[apart != 0]
    if len(apart) == 0:
        return 1.0
    untied = len(np.unique(np.abs(apart))) == len(apart)
    if untied and len(apart) <= MOST_UNTIED:
        return float(scipy.stats.wilcoxon(apart, method="exact").pvalue)
    if len(apart) > MOST_COUNTED:
        return float(scipy.stats.wilcoxon(apart, method="asymptotic").pvalue)
    # the share of all 2^N changes of sign whose rank sum lies as far out
    ranks = scipy.stats.rankdata(np.abs(apart))
    signs = (np.arange(2 ** len(ranks))[:, None] >> np.arange(len(ranks))) & 1
    centre = ranks.sum() / 2
    return float((np.abs(signs @ ranks - centre) >= abs(ranks[apart > 0].sum() - centre) - 1e-9).mean())


def compare_with_baseline(
    values: Mapping[str, Mapping[Hashable, float]], baseline: str, *, test: PairedTest = "t", overlap: float = 0.0
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
            found[name] = paired_test(*pair, test=test, overlap=overlap)
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


def mcnemar(first: Numbers, second: Numbers) -> float:
    """p of McNemar's test that two models are right equally often, from whether each was right on each case [N].

    The exact binomial test where 25 cases or fewer are right in one model only; else chi-squared with one degree of
    freedom, corrected for continuity (Edwards 1948).
    """
    ours = truths(first, "first", len(np.asarray(first)))
    theirs = truths(second, "second", len(ours))
    only_ours, only_theirs = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
    apart = only_ours + only_theirs
    if apart == 0:
        return 1.0
    if apart <= MOST_EXACT:
        return float(scipy.stats.binomtest(only_ours, apart).pvalue)
    return float(scipy.stats.chi2.sf(max(0, abs(only_ours - only_theirs) - 1) ** 2 / apart, 1))


# --- DeLong's variance of an AUC (1988) -----------------------------------------------------------------------


def delong_variance(scores: Numbers, truth: Numbers) -> float:
    """The variance of the AUC of scores [N] for truth [N], 1 or 0. Cases count as independent: one of each patient."""
    return float(_covariance([_split(scores, truth)])[0, 0])


def delong_interval(scores: Numbers, truth: Numbers) -> Interval:
    """The AUC with DeLong's interval on the logit (see `metrics.roc.auc_interval`)."""
    return Interval(*auc_interval(*_split(scores, truth)))


def delong_test(first: Numbers, second: Numbers, truth: Numbers) -> Difference:
    """Compare the AUCs of two models' scores [N] on the same cases: first minus second, interval and p value.

    One pair of AUCs is one test, so `p_holm` is p. Where both models separate the classes perfectly, or rank all pairs
    alike, p is 1.
    """
    pairs = [_split(first, truth), _split(second, truth)]
    difference = auc(*pairs[0]) - auc(*pairs[1])
    (one, both), (_, two) = _covariance(pairs)
    deviation = float(np.sqrt(max(0.0, one + two - 2 * both)))
    if deviation < 1e-12:  # what rounding leaves of zero
        if abs(difference) > 1e-12:
            raise BadInput("statistics: DeLong's variance is zero here; compare these two models by McNemar's test")
        return Difference(0.0, 0.0, 0.0, 1.0, 1.0, len(numbers(truth, "truth")))
    reach = float(scipy.stats.norm.ppf((1 + CONFIDENCE) / 2)) * deviation
    p = float(2 * scipy.stats.norm.sf(abs(difference) / deviation))
    return Difference(difference, difference - reach, difference + reach, p, p, len(numbers(truth, "truth")))


def _split(scores: Numbers, truth: Numbers) -> tuple[np.ndarray, np.ndarray]:
    """Scores of positive and of negative cases."""
    found = numbers(scores, "scores")
    positive = truths(truth, "truth", len(found))
    if positive.sum() < 2 or (~positive).sum() < 2:
        raise BadInput("statistics: DeLong's method needs two positive and two negative cases or more")
    return found[positive], found[~positive]


def _covariance(pairs: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Covariances [K, K] of the AUCs of K models, from the scores of their positive and negative cases."""
    of_positives, of_negatives = zip(*(placements(*pair) for pair in pairs), strict=True)
    parts = (np.atleast_2d(np.cov(np.stack(rows))) / len(rows[0]) for rows in (of_positives, of_negatives))
    return sum(parts, np.zeros((len(pairs), len(pairs))))


# --- permutation test ---------------------------------------------------------------------------------------


Scores = Tensor | np.ndarray

#: steps of the exact count; where ranks would need more, the normal approximation of their sum is used
MOST_STEPS = 3e7


def chance_of_sum(weights: Sequence[int], drawn: int, images: int, least: int) -> float:
    """Probability that `drawn` of the images have weights of `least` or more together.

    `weights`: whole numbers of some of the images; all others have none. Images are looked at one after another; the
    table holds the probability of every number drawn so far with every sum.
    """
    if least <= 0:
        return 1.0
    table = np.zeros((min(drawn, len(weights)) + 1, sum(weights) + 1))
    table[0, 0] = 1.0
    so_far = np.arange(len(table))[:, None]
    for seen, weight in enumerate(weights):
        share = np.clip((drawn - so_far) / (images - seen), 0.0, 1.0)
        taken = table * share
        table *= 1 - share
        table[1:, weight:] += taken[:-1, : table.shape[1] - weight]
    return float(min(1.0, table[:, least:].sum()))


def chance_of_groups(groups: Sequence[tuple[int, int, int]], least: int) -> float:
    """Probability that `least` or more are drawn in all groups together, each (looked at, drawn, images): of so many
    images in the group so many are drawn, and so many are looked at."""
    table = np.ones(1)
    for looked_at, drawn, images in groups:
        table = np.convolve(table, scipy.stats.hypergeom.pmf(np.arange(looked_at + 1), images, drawn, looked_at))
    return float(min(1.0, table[least:].sum())) if least > 0 else 1.0


def chance_of_order(
    members: Scores, others: Scores, member_cases: np.ndarray | None = None, other_cases: np.ndarray | None = None
) -> float:
    """Probability that scores [N] of members lie as far above scores [M] of others by chance (one-sided rank-sum test).

    `member_cases` [N] and `other_cases` [M]: equal for images of one patient, whose mean score counts once.
    """
    above, below = by_patient(members, member_cases), by_patient(others, other_cases)
    if not len(above) or not len(below):
        return 1.0
    ranks = scipy.stats.rankdata(np.concatenate([above, below]))
    doubled = np.rint(2 * ranks).astype(int)
    own = doubled[: len(above)]
    if len(above) > len(below):  # the same question about the smaller group: are the others far below?
        doubled = 2 * (len(doubled) + 1) - doubled
        own = doubled[len(above) :]
    if len(doubled) * len(own) * doubled.sum() <= MOST_STEPS:
        return chance_of_sum(doubled.tolist(), len(own), len(doubled), int(own.sum()))
    return float(scipy.stats.mannwhitneyu(above, below, alternative="greater", method="asymptotic").pvalue)


def by_patient(scores: Scores, cases: np.ndarray | None) -> np.ndarray:
    """The mean score of each patient; the scores as they are where patients are not known."""
    values = np.asarray(scores, dtype=np.float64)
    if cases is None:
        return values
    _, place = np.unique(np.asarray(cases), return_inverse=True)
    return np.bincount(place, weights=values) / np.bincount(place)


def chance_of_firsts(count: int, trials: int, others: int) -> float:
    """Probability that `count` or more of the trials rank their own image before all of the same `others` images.

    Each does with probability 1 / (others + 1). They share the others, so they are no independent throws; this is the
    chance of the worst dependence, where all trials have one probability in common (beta-binomial).
    """
    return float(scipy.stats.betabinom.sf(count - 1, trials, 1, others))
