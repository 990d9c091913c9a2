"""What a claim is: a sentence of a paper with its numbers, the studies that check it, and a rule written beforehand."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from polyclinic.claims.rules import Rule

Scale = Literal["quick", "full"]
SCALES: tuple[Scale, ...] = get_args(Scale)


@dataclass(frozen=True)
class Row:
    """One measured quantity of one arm: a value for each seed."""

    label: str
    metric: str
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def std(self) -> float:
        """The sample standard deviation; 0 for one value."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    def as_json(self) -> dict[str, object]:
        numbers = {"mean": self.mean, "std": self.std, "n": len(self.values), "values": list(self.values)}
        return {"label": self.label, "metric": self.metric, **numbers}


#: run folders by arm, in the order of the seeds -> what was measured
Measure = Callable[[Mapping[str, Sequence[Path]], Scale], list[Row]]


@dataclass(frozen=True)
class Number:
    """A figure of the paper; `std` where the paper gives one."""

    label: str
    metric: str
    mean: float
    std: float | None = None


@dataclass(frozen=True)
class Minutes:
    """An estimate for a whole claim; None where it is not meant to run there.

    Minutes on a GPU are those of all runs one after another, of which six share the GPU.
    """

    cpu: float | None
    gpu: float | None


@dataclass(frozen=True)
class Claim:
    """`study`: a file in `studies/`. `arms`: changes of it by label, such as `method.name=cwt`.

    `common`, `scales` and `phantom` are changes for all arms: always, at a scale, and with phantoms in place of images.
    `arms_at`: changes of one arm at one scale, such as a number of steps that is larger at `full`.
    `post_hoc`: the rule was written when a result for it was known already.
    """

    name: str
    paper: str
    place: str
    sentence: str
    numbers: tuple[Number, ...]
    paper_data: str
    our_data: str
    study: str
    arms: Mapping[str, tuple[str, ...]]
    measure: Measure
    rule: Rule
    minutes: Mapping[Scale, Minutes]
    common: tuple[str, ...] = ()
    scales: Mapping[Scale, tuple[str, ...]] = field(default_factory=dict)
    phantom: tuple[str, ...] = ()
    arms_at: Mapping[Scale, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    seeds: Mapping[Scale, int] = field(default_factory=lambda: {"quick": 3, "full": 3})
    axis: str = ""  #: what the labels are numbers of, where the figure is a curve
    post_hoc: bool = False
    decides: str = ""  #: the claim that did not hold, and whose reason this experiment looks for
    finding: str = ""  #: what the experiments that look for the reason have shown, where a claim has some
    picture: str = ""  #: a picture in a run folder that the paper has, too: the first run's is copied beside the figure

    def changes(self, label: str, scale: Scale, *, phantom: bool) -> tuple[str, ...]:
        """All changes of the study for one arm; later ones stand above earlier ones."""
        drawn = self.phantom if phantom else ()
        own = self.arms_at.get(scale, {}).get(label, ())
        return (*self.common, *self.scales.get(scale, ()), *drawn, *self.arms[label], *own)
