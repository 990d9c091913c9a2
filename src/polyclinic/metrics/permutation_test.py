"""Exact permutation tests over patients: under the null hypothesis members and held-out patients are exchangeable.

Nothing is assumed about the scores. Images of one patient stand together: patients are exchanged, and not images.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

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
    from scipy.stats import hypergeom  # imported late, as below

    table = np.ones(1)
    for looked_at, drawn, images in groups:
        table = np.convolve(table, hypergeom.pmf(np.arange(looked_at + 1), images, drawn, looked_at))
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
    from scipy import stats  # imported late: every process of a run would pay for it, and only audits need it

    ranks = stats.rankdata(np.concatenate([above, below]))
    doubled = np.rint(2 * ranks).astype(int)
    own = doubled[: len(above)]
    if len(above) > len(below):  # the same question about the smaller group: are the others far below?
        doubled = 2 * (len(doubled) + 1) - doubled
        own = doubled[len(above) :]
    if len(doubled) * len(own) * doubled.sum() <= MOST_STEPS:
        return chance_of_sum(doubled.tolist(), len(own), len(doubled), int(own.sum()))
    return float(stats.mannwhitneyu(above, below, alternative="greater", method="asymptotic").pvalue)


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
    from scipy import stats

    return float(stats.betabinom.sf(count - 1, trials, 1, others))
