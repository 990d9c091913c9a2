"""Rules that decide a claim: yes, no, or not enough data. A rule is written before the runs, and compares means.

Differences are taken seed by seed. Student's t gives their 95 % interval: the rule holds if the whole interval lies on
the claimed side, it does not if the whole interval lies on the other side, and else there are not enough data.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Holds = Literal["yes", "no", "not enough data"]
#: values, one for each seed, by label and metric
Table = Mapping[tuple[str, str], Sequence[float]]


@dataclass(frozen=True)
class Verdict:
    holds: Holds
    why: str


class Rule(Protocol):
    @property
    def words(self) -> str:
        """The rule as a sentence."""
        ...

    def judge(self, table: Table) -> Verdict: ...


@dataclass(frozen=True)
class Lower:
    """The first arm's mean lies below `factor` times the second's, less `by`; turn both around for higher."""

    first: str
    second: str
    metric: str
    by: float = 0.0
    factor: float = 1.0

    @property
    def words(self) -> str:
        times = f"{self.factor:g} times " if self.factor != 1 else ""
        margin = f" by at least {self.by:g}" if self.by > 0 else f" plus {-self.by:g}" if self.by < 0 else ""
        return f"{self.metric} of {self.first} is lower than {times}that of {self.second}{margin}"

    def judge(self, table: Table) -> Verdict:
        first, second = (table.get((label, self.metric), ()) for label in (self.first, self.second))
        if len(first) != len(second):  # a seed is missing, and nobody knows which
            return Verdict("not enough data", f"{self.words}: {len(first)} and {len(second)} seeds make no pairs")
        differences = [a - self.factor * b + self.by for a, b in zip(first, second, strict=True)]
        return _judge_sign(differences, self.words, lower=True)


@dataclass(frozen=True)
class AtMost:
    """An arm's mean is at most a number. `exact`: one value decides, since nothing in it is drawn at random."""

    label: str
    metric: str
    value: float
    exact: bool = False

    @property
    def words(self) -> str:
        return f"{self.metric} of {self.label} is at most {self.value:g}"

    def judge(self, table: Table) -> Verdict:
        values = [value - self.value for value in table.get((self.label, self.metric), ())]
        if self.exact and values:
            return Verdict("yes" if max(values) <= 0 else "no", f"{self.words}: {max(values) + self.value:.4g}")
        return _judge_sign(values, self.words, lower=True)


@dataclass(frozen=True)
class AtLeast:
    """An arm's mean is at least a number. `exact`: one value decides, since nothing in it is drawn at random."""

    label: str
    metric: str
    value: float
    exact: bool = False

    @property
    def words(self) -> str:
        return f"{self.metric} of {self.label} is at least {self.value:g}"

    def judge(self, table: Table) -> Verdict:
        values = [value - self.value for value in table.get((self.label, self.metric), ())]
        if self.exact and values:
            return Verdict("yes" if min(values) >= 0 else "no", f"{self.words}: {min(values) + self.value:.4g}")
        return _judge_sign(values, self.words, lower=False)


@dataclass(frozen=True)
class AllOf:
    """Every part holds; one that does not decides."""

    parts: tuple[Rule, ...]

    @property
    def words(self) -> str:
        return "; and ".join(part.words for part in self.parts)

    def judge(self, table: Table) -> Verdict:
        found = [part.judge(table) for part in self.parts]
        why = ". ".join(one.why for one in found)
        states = {one.holds for one in found}
        if "no" in states:
            return Verdict("no", why)
        return Verdict("yes" if states == {"yes"} else "not enough data", why)


@dataclass(frozen=True)
class Provided:
    """A rule that says something only where a condition holds: methods that have learnt nothing are alike, too."""

    condition: Rule
    rule: Rule

    @property
    def words(self) -> str:
        return f"{self.rule.words}; provided that {self.condition.words}"

    def judge(self, table: Table) -> Verdict:
        met = self.condition.judge(table)
        if met.holds == "yes":
            return self.rule.judge(table)
        return Verdict("not enough data", f"the rule says nothing, as its condition does not hold. {met.why}")


def higher(first: str, second: str, metric: str, by: float = 0.0) -> Lower:
    """The first arm's mean lies above the second's by at least `by`."""
    return Lower(second, first, metric, by)


def falling(labels: Sequence[str], metric: str) -> AllOf:
    """The metric falls from each label to the next."""
    return AllOf(tuple(Lower(b, a, metric) for a, b in itertools.pairwise(labels)))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Student's t interval of the mean of two or more values."""
    from polyclinic.metrics.statistics import mean_interval  # here: it imports scipy

    found = mean_interval(list(values))
    return found.low, found.high


def _judge_sign(values: Sequence[float], words: str, *, lower: bool) -> Verdict:
    if len(values) < 2:
        return Verdict("not enough data", f"{words}: {len(values)} seeds, and an interval needs two")
    low, high = interval(values)
    below: Callable[[float], bool] = (lambda x: x <= 0) if lower else (lambda x: x >= 0)
    told = f"{words}: difference {statistics.fmean(values):.3g}, 95 % interval {low:.3g} to {high:.3g}"
    if below(low) and below(high):
        return Verdict("yes", told)
    return Verdict("not enough data" if below(low) or below(high) else "no", told)
