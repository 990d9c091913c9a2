"""Rules that decide a claim: yes, no, or undecided. A rule is written before the runs, as sentences about means:

    mae of cwt-replay is lower than 1.15 times that of centralized
    accuracy of fedavg is lower than that of fedreplay by at least 0.05      (or: plus 0.05)
    psnr of cwt-replay is at least 25                                        (or: at most)

Differences are taken seed by seed. Where a sentence is about images or patients, a seed has a list of values: then
they are taken image by image, and the seeds are blocks. A sentence holds if the whole 95 % interval lies on the claimed
side, it does not if the whole interval lies on the other side, and else it is undecided, with the number of seeds (or
images) that would decide it if the mean and the scatter stayed as they are.
"""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from polyclinic.errors import BadInput

Word = Literal["yes", "no", "undecided"]
#: one for each seed: a value, None where there is none, or a list with a value for each image
Value = float | Sequence[float] | None
Values = Sequence[Value]
#: values by label and metric
Table = Mapping[tuple[str, str], Values]
#: no more seeds than this are named
MOST_NEEDED = 999
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

    `exact`: one value decides, since nothing in it is drawn at random. `unit`: what a value is of, seeds or images.
    """

    words: str
    metric: str
    label: str
    other: str = ""
    factor: float = 1.0
    limit: float = 0.0
    at_least: bool = False
    exact: bool = False
    unit: str = "seeds"

    def judge(self, table: Table) -> Verdict:
        values = table.get((self.label, self.metric), ())
        others = table.get((self.other, self.metric), ()) if self.other else [0.0] * len(values)
        if len(values) != len(others):  # a seed is missing, and nobody knows which
            return Verdict("undecided", f"{self.words}: {len(values)} and {len(others)} {self.unit} make no pairs")
        blocks = [found for a, b in zip(values, others, strict=True) if (found := self._differences(a, b))]
        if self.exact and blocks:
            worst = min(map(min, blocks)) if self.at_least else max(map(max, blocks))
            return Verdict("yes" if self._holds(worst) else "no", f"{self.words}: {worst + self.limit:.4g}")
        return self._judge_interval(blocks)

    def _differences(self, value: Value, other: Value) -> list[float]:
        """Of one seed, by image where the seed has images; a limit is compared with each."""
        if value is None or other is None:
            return []
        ours = value if isinstance(value, Sequence) else [value]
        theirs = other if isinstance(other, Sequence) else [other] * len(ours)
        return [a - self.factor * b - self.limit for a, b in zip(ours, theirs, strict=True)]

    def _judge_interval(self, blocks: Sequence[Sequence[float]]) -> Verdict:
        by_image = any(len(block) > 1 for block in blocks)
        if sum(map(len, blocks)) < 2:
            return Verdict("undecided", f"{self.words}: {len(blocks)} {self.unit}, and an interval needs two")
        if self.other and not any(map(any, blocks)):  # an interval without width would hold: no image failed either way
            return Verdict("undecided", f"{self.words}: no pair differs")
        mean = statistics.fmean(map(statistics.fmean, blocks))
        low, high = mixed_interval(blocks) if by_image else interval([block[0] for block in blocks])
        holding = [self._holds(low), self._holds(high)]
        word: Word = "yes" if all(holding) else "undecided" if any(holding) else "no"
        why = f"{word}: {self.words}: difference {mean:.3g}, 95 % interval {low:.3g} to {high:.3g}"
        if word == "undecided":
            why += f"; {needed(mean, (high - low) / 2, len(blocks), self.unit)}"
        return Verdict(word, why)

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


def parse_rule(sentences: Sequence[str], provided: str = "", exact: Sequence[str] = (), unit: str = "seeds") -> Rule:
    """The rule that some sentences make; `exact`: metrics of which one value decides."""
    parts = tuple(replace(parse_sentence(one, exact), unit=unit) for one in sentences)
    return Rule(parts, parse_sentence(provided, exact) if provided else None)


def parse_sentence(words: str, exact: Sequence[str] = ()) -> Sentence:
    """BadInput for a sentence of another form."""
    if found := LIMIT.fullmatch(words):
        metric, label, side, limit = found.group("metric", "label", "side", "limit")
        return Sentence(words, metric, label, limit=float(limit), at_least=side == "least", exact=metric in exact)
    if found := LOWER.fullmatch(words):
        limit = float(found["plus"] or 0) - float(found["by"] or 0)
        factor = float(found["factor"] or 1)
        exact_one = found["metric"] in exact
        return Sentence(words, found["metric"], found["label"], found["other"], factor, limit, exact=exact_one)
    raise BadInput(f"rule '{words}': write 'METRIC of ARM is lower than that of ARM', or 'is at most NUMBER'")


def mixed_interval(blocks: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The 95 % interval of a mean over images in blocks, a block a seed, whose effect is random.

    The variance is that between seeds, as far as images alone do not explain it, and that of images inside them;
    degrees of freedom are Satterthwaite's. With one seed it says nothing of other seeds.
    """
    from scipy.stats import t  # here: it is slow to import

    seeds = len(blocks)
    means = [statistics.fmean(block) for block in blocks]
    inside = statistics.fmean(statistics.variance(block) / len(block) if len(block) > 1 else 0.0 for block in blocks)
    apart = statistics.variance(means) if seeds > 1 else 0.0
    between = max(0.0, apart - inside)
    images = sum(map(len, blocks)) - seeds
    terms = [(between / seeds, seeds - 1), (inside / seeds, images)]
    variance = sum(term for term, _ in terms)
    freedom = variance**2 / sum(term**2 / degrees for term, degrees in terms if term) if variance else 1
    half = float(t.ppf(0.975, freedom)) * math.sqrt(variance)
    mean = statistics.fmean(means)
    return mean - half, mean + half


def needed(mean: float, half: float, count: int, unit: str) -> str:
    """How many seeds (or images) would decide, in words: the interval shrinks with their root, and with Student's t."""
    from scipy.stats import t  # here: it is slow to import

    if count > 1:
        scatter = half * math.sqrt(count) / float(t.ppf(0.975, count - 1))
        for more in range(count + 1, MOST_NEEDED + 1):
            if float(t.ppf(0.975, more - 1)) * scatter < abs(mean) * math.sqrt(more):
                return f"about {more} {unit} would decide"
    return f"more than {MOST_NEEDED if count > 1 else 1} {unit} are needed"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Student's t interval of the mean of two or more values."""
    from polyclinic.metrics.statistics import mean_interval  # here: it imports scipy

    found = mean_interval(list(values))
    return found.low, found.high
