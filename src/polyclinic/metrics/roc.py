"""How well a score tells members from others: area under the curve with its interval, and hits at few false alarms.

Ties count half, so a constant score has an area of one half and no hits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats
from torch import Tensor

from polyclinic.errors import BadInput

FALSE_ALARMS = 0.01
CONFIDENCE = 0.95

Scores = Tensor | np.ndarray


@dataclass(frozen=True)
class Separation:
    """Of scores that are meant to be higher for members.

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
    def told_apart(self) -> bool:
        """Whether members score higher than others beyond chance: the interval of the area lies above one half."""
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
    """How well scores [N] of members stand out from scores [M] of others."""
    inside, outside = _checked(members, "members"), _checked(others, "others")
    auc, low, high = area(inside, outside, confidence)
    caught = int((inside > threshold(outside, false_alarms)).sum())
    hits_low, hits_high = share_interval(caught, len(inside), confidence)
    hits = caught / len(inside)
    return Separation(auc, low, high, hits, hits_low, hits_high, false_alarms, len(inside), len(outside))


def _checked(scores: Scores, who: str) -> np.ndarray:
    found = np.asarray(scores, dtype=np.float64)
    if found.ndim != 1 or len(found) < 2:
        raise BadInput(f"membership: scores of {who} have shape {found.shape}; give two or more numbers")
    if np.isnan(found).any():
        raise BadInput(f"membership: scores of {who} are not all numbers; drop images that cannot be scored")
    return found


def area(members: np.ndarray, others: np.ndarray, confidence: float = CONFIDENCE) -> tuple[float, float, float]:
    """The probability that a member scores higher than another image, ties counting half, and its interval.

    DeLong's variance, on the logit where the area is neither 0 nor 1, so that the interval stays inside. An area of
    exactly 0 or 1 has a variance of zero by DeLong, which is no certainty: there the rule of three is used instead,
    with the smaller of the two numbers of images.
    """
    n, m = len(members), len(others)
    ranks = stats.rankdata(np.concatenate([members, others]))
    # the share of the other set that each one beats
    of_members = (ranks[:n] - stats.rankdata(members)) / m
    of_others = 1 - (ranks[n:] - stats.rankdata(others)) / n
    auc = float(of_members.mean())
    if auc in (0.0, 1.0):
        reach = min(1.0, -np.log(1 - confidence) / min(n, m))
        return (auc, 1 - reach, 1.0) if auc else (auc, 0.0, reach)
    deviation = np.sqrt(of_members.var(ddof=1) / n + of_others.var(ddof=1) / m)
    step = stats.norm.ppf((1 + confidence) / 2) * deviation / (auc * (1 - auc))
    centre = np.log(auc / (1 - auc))
    low, high = (float(1 / (1 + np.exp(-(centre + sign * step)))) for sign in (-1, 1))
    return auc, low, high


def threshold(others: np.ndarray, false_alarms: float) -> float:
    """The lowest threshold that at most this share of the others exceed (strictly)."""
    allowed = int(np.floor(false_alarms * len(others) + 1e-9))
    return float(np.sort(others)[::-1][allowed])


def share_interval(count: int, total: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The exact interval of a share (Clopper-Pearson)."""
    found = stats.binomtest(count, total).proportion_ci(confidence, method="exact")
    return float(found.low), float(found.high)
