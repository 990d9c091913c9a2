"""Rules that decide a claim: yes, no, or undecided. A rule is written before the runs, as sentences about means:

    mae of cwt-replay is lower than 1.15 times that of centralized
    accuracy of fedavg is lower than that of fedreplay by at least 0.05      (or: plus 0.05)
    psnr of cwt-replay is at least 25                                        (or: at most)

Differences are taken seed by seed, or image by image where a claim is about images. Student's t gives their 95 %
interval: a sentence holds if the whole interval lies on the claimed side, it does not if the whole interval lies on the
other side, and else it is undecided.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from polyclinic.errors import BadInput

Word = Literal["yes", "no", "undecided"]
#: values, one for each seed or image, by label and metric; None where there is none
Table = Mapping[tuple[str, str], Sequence[float | None]]
LOWER = re.compile(
    r"(?P<metric>.+) of (?P<label>.+) is lower than (?:(?P<factor>\S+) times )?that of (?P<other>.+?)"
    r"(?: by at least (?P<by>\S+)| plus (?P<plus>\S+))?"
)
LIMIT = re.compile(r"(?P<metric>.+) of (?P<label>.+) is at (?P<side>most|least) (?P<limit>\S+)")


@dataclass(frozen=True)
class Verdict:
    word: Word
    why: str


@dataclass(frozen=True)
class Sentence:
    """The metric of an arm lies below `factor` times that of another arm plus `limit`, or on one side of `limit`.

    `exact`: one value decides, since nothing in it is drawn at random.
    """

    words: str
    metric: str
    label: str
    other: str = ""
    factor: float = 1.0
    limit: float = 0.0
    at_least: bool = False
    exact: bool = False

    def judge(self, table: Table) -> Verdict:
        values = table.get((self.label, self.metric), ())
        others = table.get((self.other, self.metric), ()) if self.other else [0.0] * len(values)
        if len(values) != len(others):  # a seed is missing, and nobody knows which
            return Verdict("undecided", f"{self.words}: {len(values)} and {len(others)} seeds make no pairs")
        pairs = [(a, b) for a, b in zip(values, others, strict=True) if a is not None and b is not None]
        differences = [a - self.factor * b - self.limit for a, b in pairs]
        if self.exact and differences:
            worst = min(differences) if self.at_least else max(differences)
            return Verdict("yes" if self._holds(worst) else "no", f"{self.words}: {worst + self.limit:.4g}")
        return self._judge_interval(differences)

    def _judge_interval(self, differences: Sequence[float]) -> Verdict:
        if len(differences) < 2:
            return Verdict("undecided", f"{self.words}: {len(differences)} seeds, and an interval needs two")
        if self.other and not any(differences):  # an interval without width would hold: no image failed either way
            return Verdict("undecided", f"{self.words}: no pair differs")
        low, high = interval(differences)
        mean = statistics.fmean(differences)
        why = f"{self.words}: difference {mean:.3g}, 95 % interval {low:.3g} to {high:.3g}"
        holding = [self._holds(low), self._holds(high)]
        return Verdict("yes" if all(holding) else "undecided" if any(holding) else "no", why)

    def _holds(self, difference: float) -> bool:
        return difference >= 0 if self.at_least else difference <= 0


@dataclass(frozen=True)
class Rule:
    """Every sentence holds; one that does not decides.

    `provided`: the rule says nothing where this sentence does not hold. Methods that learnt nothing are alike, too.
    """

    sentences: tuple[Sentence, ...]
    provided: Sentence | None = None

    @property
    def words(self) -> str:
        told = "; and ".join(one.words for one in self.sentences)
        return f"{told}; provided that {self.provided.words}" if self.provided else told

    def judge(self, table: Table) -> Verdict:
        if self.provided and (met := self.provided.judge(table)).word != "yes":
            return Verdict("undecided", f"the rule says nothing, as its condition does not hold. {met.why}")
        found = [one.judge(table) for one in self.sentences]
        words = {one.word for one in found}
        word: Word = "no" if "no" in words else "yes" if words == {"yes"} else "undecided"
        return Verdict(word, ". ".join(one.why for one in found))


def parse_rule(sentences: Sequence[str], provided: str = "", exact: Sequence[str] = ()) -> Rule:
    """The rule that some sentences make; `exact`: metrics of which one value decides."""
    parts = tuple(parse_sentence(one, exact) for one in sentences)
    return Rule(parts, parse_sentence(provided, exact) if provided else None)


def parse_sentence(words: str, exact: Sequence[str] = ()) -> Sentence:
    """BadInput for a sentence of another form."""
    if found := LIMIT.fullmatch(words):
        metric, label, side, limit = found.group("metric", "label", "side", "limit")
        return Sentence(words, metric, label, limit=float(limit), at_least=side == "least", exact=metric in exact)
    if found := LOWER.fullmatch(words):
        limit = float(found["plus"] or 0) - float(found["by"] or 0)
        factor = float(found["factor"] or 1)
        return Sentence(words, found["metric"], found["label"], found["other"], factor, limit)
    raise BadInput(f"rule '{words}': write 'METRIC of ARM is lower than that of ARM', or 'is at most NUMBER'")


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Student's t interval of the mean of two or more values."""
    from polyclinic.metrics.statistics import mean_interval  # here: it imports scipy

    found = mean_interval(list(values))
    return found.low, found.high
