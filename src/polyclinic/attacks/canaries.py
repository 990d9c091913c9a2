"""Epsilon from below: canaries that are in a private training or not, and what tells the two apart.

A canary is a row whose clipped gradient has length 1 (in clipping norms) along a coordinate that no other row touches.
Coordinates have independent noise, and canaries take part independently: one run with M canaries is M runs with one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

LEVEL = 0.01  #: chance that all checks of a right mechanism together raise an alarm
CONFIDENCE = 0.95  #: of the lower bounds
THRESHOLDS = (0, 1, 3, 10, 30, 100, 300)  #: canaries on the wrong side of a threshold that is tried


def likelihoods(released: np.ndarray, noise: float, rate: float) -> np.ndarray:
    """The log likelihood ratio of "in" over "out" of each canary [M], from its coordinates of all steps [T, M]: what a
    Gaussian of deviation `noise` says where the canary is in a step with chance `rate`."""
    exponent = (2 * released - 1) / (2 * noise**2)
    return np.asarray(np.logaddexp(math.log1p(-rate) if rate < 1 else -np.inf, math.log(rate) + exponent).sum(0))


def lower_bound(inside: np.ndarray, outside: np.ndarray, delta: float) -> float:
    """An epsilon that the mechanism has at least, at `CONFIDENCE`: the best over a few thresholds fixed before, each
    with exact intervals of both error rates (Clopper and Pearson), corrected for their number."""
    from scipy import stats

    tail, best = (1 - CONFIDENCE) / (4 * len(THRESHOLDS)), 0.0
    for own, others in ((inside, outside), (-outside, -inside)):
        for wrong in (one for one in THRESHOLDS if one < len(others)):
            cut = np.sort(others)[-1 - wrong]
            hits, alarms = int((own > cut).sum()), int((others > cut).sum())
            least = stats.beta.ppf(tail, hits, len(own) - hits + 1) if hits else 0.0
            most = stats.beta.ppf(1 - tail, alarms + 1, len(others) - alarms)
            if least > delta:
                best = max(best, math.log((least - delta) / most))
    return best


def gaussian_bound(inside: np.ndarray, outside: np.ndarray, epsilon_of: Callable[[float], float]) -> float:
    """The same if scores were Gaussian with one deviation, which is a model's figure: the epsilon (`epsilon_of`) of the
    lower end of an interval of how far the means lie apart."""
    spread = math.sqrt((inside.var(ddof=1) + outside.var(ddof=1)) / 2)
    if spread == 0:
        return 0.0
    apart, count = (inside.mean() - outside.mean()) / spread, min(len(inside), len(outside))
    error = math.sqrt(2 / count + apart**2 / (4 * count))
    return epsilon_of(least) if (least := apart - 1.645 * error) > 1e-3 else 0.0


@dataclass(frozen=True)
class Check:
    """One thing that the accountant takes for granted: how often a right mechanism looks as bad (`chance`)."""

    name: str
    chance: float
    words: str


def check_noise(released: np.ndarray, noise: float) -> Check:
    """Whether canaries that are out [T, M] see noise of the deviation that is accounted for, and not less in any step
    (as where a sum is divided by the true size of a batch, and not by the expected one)."""
    from scipy import stats

    squares, (steps, many) = np.square(released), released.shape
    whole, each = squares.sum() / noise**2, squares.sum(1) / noise**2
    chances = (stats.chi2.cdf(whole, steps * many), steps * stats.chi2.cdf(each, many).min())
    found = f"deviation {np.sqrt(squares.mean()):.4g} of the noise ({np.sqrt(squares.mean(1).min()):.4g} in one step)"
    return Check("noise", min(1.0, 2 * float(min(chances))), f"{found}, {noise:.4g} in the account")


def check_reuse(released: np.ndarray) -> Check:
    """Whether the noise of one step [T, M] is that of another: noise that comes again can be taken off."""
    from scipy import stats

    if len(released) < 2:
        return Check("fresh noise", 1.0, "one step only")
    units = released / np.linalg.norm(released, axis=1, keepdims=True)
    alike = np.abs(units @ units.T)[np.triu_indices(len(units), 1)]
    chance = 2 * stats.norm.sf(alike.max() * math.sqrt(released.shape[1])) * len(alike)
    return Check("fresh noise", min(1.0, float(chance)), f"correlation {alike.max():.2f} of the noise of two steps")


def check_sampling(taken: np.ndarray, rate: float) -> Check:
    """Whether each canary takes part in each step [T, M] with the same chance, whatever happened before and whoever
    else does: totals of canaries, and of steps, have the spread of independent throws."""
    from scipy import stats

    if rate >= 1:
        return Check("sampling", 1.0 if taken.all() else 0.0, "all take part in every step")
    chances = []
    for axis in (0, 1):
        throws, totals = taken.shape[axis], taken.sum(axis)
        spread = np.square(totals - rate * throws).sum() / (throws * rate * (1 - rate))
        chances.append(2 * min(stats.chi2.cdf(spread, len(totals)), stats.chi2.sf(spread, len(totals))))
    words = f"share {taken.mean():.4f} takes part, {rate:.4f} in the account"
    return Check("sampling", min(1.0, 2 * min(chances)), words)


def check_bound(name: str, largest: float, most: float) -> Check:
    """Whether a length that must not be more than `most` is not."""
    return Check(name, 1.0 if largest <= most * (1 + 1e-3) else 0.0, f"{largest:.4g}, and {most:.4g} in the account")
