"""Statistics that are safe to send: computed from cases at a site, and coarse enough to be about no single patient.

Of each metric leave its value, the ends of its interval (bootstrap by patient) and its variance; all are multiples of a
step that one patient cannot exceed by far, and ends are rounded outwards, so that an interval only widens. Of the
calibration leaves a histogram of few bins, in which those of few images are empty.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from polyclinic.metrics.statistics.intervals import Interval, WeightedMetrics, weighted_bootstrap

#: draws of the bootstrap
DRAWS = 1000
#: patients below which nothing is told: an interval of so few says little, and much about each
FEWEST = 10
#: bins of the calibration
BINS = 5
#: steps from the value of a difference to the ends of its interval, at least. A step is what one patient can change in
#: both models; the patient is drawn up to three times in 97.5 % of the bootstrap's draws, which is one and a half steps
NARROWEST = 2
#: of a step: less is rounding of floating-point numbers
SLACK = 1e-6
#: standard deviations from the middle of a normal distribution to the ends of its 95 %
NORMAL_95 = 1.959964


def safe_intervals(
    metrics: WeightedMetrics,
    cases: int,
    patients: np.ndarray | None,
    least: int,
    bounds: Mapping[str, float] | None = None,
    *,
    paired: bool = False,
) -> dict[str, list[float]]:
    """Value, low, high and variance of each metric; nothing where there are too few patients.

    `least`: fewest patients of the site's policy; 0 at a simulated site, whose figures stay fine. `bounds`: how much
    one patient can change a metric times their number, 1 if not given. `paired`: these are differences of two models.
    """
    count = cases if patients is None else len(np.unique(patients))
    if count < max(FEWEST, least):
        return {}
    # BCa would move the ends of a difference that one patient makes out to the draws that have this patient most often
    kind: Literal["bca", "percentile"] = "percentile" if paired and least else "bca"
    found = weighted_bootstrap(metrics, cases, patients=patients, address=("safe", "bootstrap"), draws=DRAWS, kind=kind)
    steps = {name: _step((bounds or {}).get(name, 1.0), count, least) for name in found}
    finite = {name: one for name, one in found.items() if np.isfinite((one.value, one.low, one.high)).all()}
    return {name: _told(one, steps[name], paired=paired) for name, one in finite.items()}


def largest_share(patients: np.ndarray | None, images: int) -> float:
    """Largest change of a mean over images by one patient, times the number of patients: 1 where each has as many."""
    if patients is None:
        return 1.0
    counts = np.unique(np.asarray(patients), return_counts=True)[1]
    return float(counts.max() / images * len(counts))


def bounds_of_classes(labels: np.ndarray, patients: np.ndarray | None, classes: int = 2) -> dict[str, float]:
    """Largest change of each metric of a classifier by one patient, times the number of patients."""
    number = len(labels) if patients is None else len(np.unique(np.asarray(patients)))
    mean = largest_share(patients, len(labels))
    own = np.arange(len(labels)) if patients is None else np.asarray(patients)
    counts = [np.unique(own[labels == one], return_counts=True)[1] for one in np.unique(labels)]
    of_class = number * max(float(some.max() / some.sum()) for some in counts)  # a patient's part of a class's images
    brier = 2 * mean if classes > 2 else mean
    return {
        "accuracy": mean,
        "calibration_error": 2 * mean,  # whose probability moves to another bin changes the gaps of two
        **dict.fromkeys(("auc", "balanced_accuracy"), of_class),
        "brier": brier,
    }


def smallest_class(labels: np.ndarray, patients: np.ndarray | None) -> int:
    """Patients of the class that the fewest have."""
    people = np.arange(len(labels)) if patients is None else np.asarray(patients)
    return min((len(np.unique(people[labels == one])) for one in np.unique(labels)), default=0)


def _step(bound: float, patients: int, least: int) -> float:
    """The step of a figure, no smaller than what one patient can change; 0 where nothing is rounded."""
    return step_above(bound / patients) if least else 0.0


def step_above(smallest: float) -> float:
    """The smallest of ..., 0.1, 0.2, 0.5, 1, 2, 5, 10, ... that is not below `smallest`."""
    power = 10.0 ** math.floor(math.log10(smallest))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= smallest * (1 - 1e-12))


def _told(one: Interval, step: float, *, paired: bool = False) -> list[float]:
    """An interval in steps. That of a difference reaches NARROWEST steps to both sides at least: of two models that
    differ on one patient only, it is the same as of two models that are the same."""
    value, low, high = one.value, one.low, one.high
    if step:
        steps, least = round(value / step), 0
        if paired:  # the nearest whole number; of two, the one nearer to zero, whatever a subtraction has rounded
            steps, least = int(math.copysign(max(math.ceil(abs(value / step) - 0.5 - SLACK), 0), value)), NARROWEST
        slack = SLACK if paired else 0.0
        low = min(math.floor(low / step + slack), steps - least) * step
        high = max(math.ceil(high / step - slack), steps + least) * step
        value = steps * step
    return [value, low, high, ((high - low) / (2 * NORMAL_95)) ** 2]


def rounded_interval(
    ends: tuple[float, float, float], bound: float, patients: int, least: int, *, paired: bool = False
) -> list[float]:
    """Value, low, high and variance of an interval (value, low, high) that was found otherwise, such as DeLong's."""
    return _told(Interval(*ends), _step(bound, patients, least), paired=paired)


def calibration_counts(
    probabilities: np.ndarray, labels: np.ndarray, least: int, patients: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Images, and those whose class was right, by the probability of the class that was said, int64 [BINS] each; both 0
    in bins of fewer than `least` patients, and in others from which these would follow (`told_cells`)."""
    said, best = probabilities.argmax(1), probabilities.max(1)
    place = np.clip((best * BINS).astype(int), 0, BINS - 1)
    images = np.bincount(place, minlength=BINS)
    right = np.bincount(place, weights=said == labels, minlength=BINS).astype(np.int64)
    people = np.arange(len(labels)) if patients is None else np.asarray(patients)
    told = told_cells([people[place == one] for one in range(BINS)], least)
    return np.where(told, images, 0), np.where(told, right, 0)


def told_cells(people: Sequence[np.ndarray], least: int) -> np.ndarray:
    """The cells of a table that are told, bool [cells], by the patients in each: those of none, and those of `least` or
    more. Where all that are not told have fewer than `least` patients together, the smallest of the others is not told
    either: the figures of all cells together would give them away."""
    numbers = np.array([len(np.unique(some)) for some in people])
    told = (numbers == 0) | (numbers >= least)

    def untold() -> int:
        """A patient may be in several cells, and counts once."""
        hidden = [some for some, known in zip(people, told, strict=True) if not known]
        return len(set().union(*(np.asarray(some).tolist() for some in hidden)))

    while 0 < untold() < least and (told & (numbers > 0)).any():
        told[np.where(told & (numbers > 0), numbers, np.iinfo(np.int64).max).argmin()] = False
    return told


def mean_of_sites(sites: Mapping[str, list[float]]) -> list[float]:
    """Value, low, high and variance of the mean over sites, from those of each: variances of sites add up."""
    values = np.array([told[0] for told in sites.values()])
    variance = float(sum(told[3] for told in sites.values())) / len(values) ** 2
    reach = NORMAL_95 * math.sqrt(variance)
    return [float(values.mean()), float(values.mean()) - reach, float(values.mean()) + reach, variance]
