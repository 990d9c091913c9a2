"""The risk of each patient: how well models that were trained on a patient are told from models that were not.

`scores` [S, P] are what S reference models say of P patients, higher where a model knows the patient better; `inside`
bool [S, P] says which were trained on each, half of the models for every patient, drawn independently of all others.
Under the null hypothesis a patient's scores and memberships are exchangeable: the test of their order is exact.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np

from polyclinic.metrics.statistics.significance import holm

LEVEL = 0.01  #: chance of naming any patient of a run that tells none apart
POWER = 0.8  #: chance of naming a patient with the smallest risk that is said to be found
#: deviations that an estimate lies below its mean at most in 1 - POWER of cases, whatever the distribution (Cantelli)
BELOW = math.sqrt(POWER / (1 - POWER))
FOR_ONE_PERCENT = 128  #: models without a patient, below which no rate at 1 % of false positives is given
GAP_FROM = 5  #: patients of a group and of all others, below which no gap is given
RARE = 0.1  #: share of the patients below which a group is called rare


@functools.lru_cache(maxsize=8)
def order_tail(count: int) -> np.ndarray:
    """P(U >= u) for u = 0 .. count^2: U counts the pairs in which the first of two groups of `count` is ahead, where
    chance alone says who is in which (the exact distribution of Mann and Whitney)."""
    rows = [np.ones(1) for _ in range(count + 1)]  # of (m, 0)
    for others in range(1, count + 1):
        new = [np.ones(1)]
        for own in range(1, count + 1):
            found = np.zeros(own * others + 1)
            found[others:] = own / (own + others) * new[own - 1]
            found[: own * (others - 1) + 1] += others / (own + others) * rows[own]
            new.append(found)
        rows = new
    return np.minimum(1.0, rows[count][::-1].cumsum()[::-1])


@dataclass(frozen=True)
class Risks:
    """Of each patient [P]: the area under the curve of models with and without the patient, ties counting half; the
    chance of that order; the same corrected for all patients (Holm)."""

    area: np.ndarray
    chance: np.ndarray
    corrected: np.ndarray
    models: int

    @property
    def found(self) -> np.ndarray:
        """Patients whom the references tell apart at `LEVEL` over all of them."""
        return self.corrected <= LEVEL

    def or_stronger(self, other: "Risks") -> "Risks":
        """The stronger of two tests of the same patients, corrected for two."""
        chance = np.minimum(1.0, 2 * np.minimum(self.chance, other.chance))
        return Risks(np.maximum(self.area, other.area), chance, np.array(holm(chance.tolist())), self.models)

    def above(self, limit: float) -> np.ndarray:
        """Those who are found, and whose risk is above the limit."""
        return self.found & (self.area > limit)

    def unclear(self, limit: float) -> np.ndarray:
        """Those who are found, and whose risk may be above the limit, though its estimate is not."""
        reach = BELOW * np.sqrt(self.area * (1 - self.area) / (self.models / 2))
        return self.found & ~self.above(limit) & (self.area + reach > limit)


def risks(scores: np.ndarray, inside: np.ndarray) -> Risks:
    ahead = np.zeros(scores.shape[1])
    ties = np.zeros(scores.shape[1])
    for patient, member in enumerate(inside.T):
        own, others = scores[member, patient], np.sort(scores[~member, patient])
        below, up_to = (np.searchsorted(others, own, side).sum() for side in ("left", "right"))
        ahead[patient], ties[patient] = below, up_to - below
    half = len(scores) // 2
    chance = order_tail(half)[ahead.astype(int)]  # a tie counts against: the test stays exact
    return Risks((ahead + ties / 2) / half**2, chance, np.array(holm(chance.tolist())), len(scores))


def smallest_risk(models: int, patients: int) -> float | None:
    """The smallest risk that is found with `POWER` among so many patients, whatever the scores' distribution; None
    where none is. The variance of an area A of n and n scores is at most A (1 - A) / n (Birnbaum and Klose 1957)."""
    half = models // 2
    enough = np.flatnonzero(order_tail(half) * patients <= LEVEL)
    if not len(enough):
        return None
    needed = enough[0] / half**2
    areas = np.arange(needed, 1.0, 0.001)
    found = areas[areas - BELOW * np.sqrt(areas * (1 - areas) / half) >= needed]
    return float(found[0]) if len(found) else 1.0


def hits_at_one_percent(scores: np.ndarray, inside: np.ndarray) -> np.ndarray | None:
    """Of each patient [P], the share of models with the patient that lie above all but 1 % of those without."""
    if inside.sum(0).min() < FOR_ONE_PERCENT:
        return None
    found = []
    for patient, member in enumerate(inside.T):
        others = np.sort(scores[~member, patient])
        found.append(float((scores[member, patient] > others[-1 - len(others) // 100]).mean()))
    return np.array(found)


def hits_over_all(scores: np.ndarray, inside: np.ndarray, false_alarms: float) -> float:
    """The same over all patients and models together, each patient in deviations from the models without."""
    out = np.where(inside, np.nan, scores)
    apart = (scores - np.nanmean(out, 0)) / np.maximum(np.nanstd(out, 0), 1e-12)
    others = np.sort(apart[~inside])
    return float((apart[inside] > others[-1 - int(len(others) * false_alarms)]).mean())


def gaussian_hits(scores: np.ndarray, inside: np.ndarray, false_alarms: float = 0.01) -> np.ndarray:
    """What a Gaussian for the models with each patient, and one for those without, would give: a model's figure."""
    from scipy import stats

    def moments(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        values = np.where(chosen, scores, np.nan)
        return np.nanmean(values, 0), np.maximum(np.nanstd(values, 0, ddof=1), 1e-12)

    (mean, spread), (mean_out, spread_out) = moments(inside), moments(~inside)
    needed = mean_out + spread_out * stats.norm.isf(false_alarms)
    return np.asarray(stats.norm.sf((needed - mean) / spread))


@dataclass(frozen=True)
class Gap:
    """Mean risk of a group less that of all others, with a 95 % interval (Welch)."""

    group: str
    patients: int
    rare: bool
    gap: float
    low: float
    high: float


def gaps(area: np.ndarray, groups: dict[str, np.ndarray]) -> list[Gap]:
    """`groups`: names to bool [P]."""
    from scipy import stats

    found = []
    for name, chosen in groups.items():
        own, others = area[chosen], area[~chosen]
        if min(len(own), len(others)) < GAP_FROM:
            continue
        low, high = stats.ttest_ind(own, others, equal_var=False).confidence_interval(0.95)
        share = len(own) / len(area)
        found.append(Gap(name, len(own), share < RARE, float(own.mean() - others.mean()), float(low), float(high)))
    return found


def rounded(count: int) -> str:
    """A number of patients as it may leave a site."""
    return (
        "no patient"
        if count == 0
        else "fewer than 5 patients"
        if count < 5
        else f"about {5 * round(count / 5)} patients"
    )
