"""ROC curves: the area under one (AUC) with its confidence interval, and true positives at few false ones.

Ties count half, so a constant score has an area of one half and no hits.
"""

from dataclasses import dataclass

import numpy as np
import scipy  # its parts are imported when they are named: some take seconds
from torch import Tensor

from polyclinic.errors import BadInput

FALSE_ALARMS = 0.01  #: an attack that is right about a few members counts (Carlini et al. 2022)
CONFIDENCE = 0.95

Scores = Tensor | np.ndarray


@dataclass(frozen=True)
class Separation:
    """Separation of members from others by scores that are meant to be higher for members.

    `auc` with its interval (DeLong et al. 1988); `hits`: the share of members above a threshold that at most
    `false_alarms` of the others exceed, with the interval of a share (Clopper-Pearson; the threshold is taken as
    given). With fewer than 1 / false_alarms others, not one of them may exceed it.
    """

    auc: float
    auc_low: float
    auc_high: float
    hits: float
    hits_low: float
    hits_high: float
    false_alarms: float
    members: int
    others: int

    @property
    def significant(self) -> bool:
        """True where members score higher than others beyond chance: the interval of the area lies above one half."""
        return self.auc_low > 0.5

    def __str__(self) -> str:
        return (
            f"AUC {self.auc:.3f} [{self.auc_low:.3f}, {self.auc_high:.3f}], "
            f"TPR {self.hits:.1%} [{self.hits_low:.1%}, {self.hits_high:.1%}] at {self.false_alarms:.0%} FPR, "
            f"{self.members} members and {self.others} others"
        )


def separation(
    members: Scores, others: Scores, *, false_alarms: float = FALSE_ALARMS, confidence: float = CONFIDENCE
) -> Separation:
    """The separation of scores [N] of members from scores [M] of others."""
    inside, outside = _checked(members, "members"), _checked(others, "others")
    area, low, high = auc_interval(inside, outside, confidence)
    caught = int((inside > threshold(outside, false_alarms)).sum())
    hits_low, hits_high = share_interval(caught, len(inside), confidence)
    hits = caught / len(inside)
    return Separation(area, low, high, hits, hits_low, hits_high, false_alarms, len(inside), len(outside))


def _checked(scores: Scores, who: str) -> np.ndarray:
    found = np.asarray(scores, dtype=np.float64)
    if found.ndim != 1 or len(found) < 2:
        raise BadInput(f"membership: scores of {who} have shape {found.shape}; give two or more numbers")
    if np.isnan(found).any():
        raise BadInput(f"membership: scores of {who} are not all numbers; drop images that cannot be scored")
    return found


def auc(positives: Scores, negatives: Scores) -> float:
    """Area under the ROC curve: the probability that a positive scores above a negative, ties counting half.

    NaN where there are no positives or no negatives.
    """
    above, below = np.asarray(positives), np.asarray(negatives)
    values, place = np.unique(np.concatenate([below, above]), return_inverse=True)
    parts = (place[len(below) :], place[: len(below)])
    return float(aucs_from_counts(*(np.bincount(part, minlength=len(values))[None] for part in parts))[0])


def aucs_from_counts(positives: np.ndarray, negatives: np.ndarray) -> np.ndarray:
    """AUCs [D] from counts [D, K] of positives and negatives with each of K scores (or in K bins), lowest first; NaN
    where there are no positives or no negatives."""
    own, rest = positives.astype(np.float64), negatives.astype(np.float64)
    won, pairs = (own * (rest.cumsum(1) - rest / 2)).sum(1), own.sum(1) * rest.sum(1)
    return np.divide(won, pairs, out=np.full(len(own), np.nan), where=pairs > 0)


def auc_interval(members: np.ndarray, others: np.ndarray, confidence: float = CONFIDENCE) -> tuple[float, float, float]:
    """The AUC of members against others, and its confidence interval.

    DeLong's variance, on the logit where the area is neither 0 nor 1, so that the interval stays inside. An area of
    exactly 0 or 1 has a variance of zero by DeLong, which is no certainty: there the rule of three is used instead,
    with the smaller of the two numbers of images.
    """
    n, m, area = len(members), len(others), auc(members, others)
    if area in (0.0, 1.0):
        reach = min(1.0, -np.log(1 - confidence) / min(n, m))
        return (area, 1 - reach, 1.0) if area else (area, 0.0, reach)
    of_members, of_others = placements(members, others)
    deviation = np.sqrt(of_members.var(ddof=1) / n + of_others.var(ddof=1) / m)
    step = scipy.stats.norm.ppf((1 + confidence) / 2) * deviation / (area * (1 - area))
    centre = np.log(area / (1 - area))
    low, high = (float(1 / (1 + np.exp(-(centre + sign * step)))) for sign in (-1, 1))
    return area, low, high


def placements(members: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The share of the others that each member scores above [N], and of the members that score above each other [M]."""
    n, m = len(members), len(others)
    ranks = scipy.stats.rankdata(np.concatenate([members, others]))
    return (ranks[:n] - scipy.stats.rankdata(members)) / m, 1 - (ranks[n:] - scipy.stats.rankdata(others)) / n


def threshold(others: np.ndarray, false_alarms: float) -> float:
    """The lowest threshold that at most this share of the others exceed (strictly)."""
    allowed = int(np.floor(false_alarms * len(others) + 1e-9))
    return float(np.sort(others)[::-1][allowed])


def share_interval(count: int, total: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The exact interval of a share (Clopper-Pearson)."""
    tail = (1 - confidence) / 2
    low = scipy.special.betaincinv(count, total - count + 1, tail) if count else 0.0
    high = scipy.special.betaincinv(count + 1, total - count, 1 - tail) if count < total else 1.0
    return float(low), float(high)
