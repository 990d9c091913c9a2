"""Power checks: an attack that found nothing must find a weak leak that is planted in the same setting.

"Withstood" is earned. Of each attack that finds nothing, the audit plants the weakest leaks that the verdict would
exclude, and runs the very same attack with the very same budget on them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from polyclinic.attacks.attack import LEAKS, NOT_TESTED, WITHSTOOD, Word
from polyclinic.audits.attack import Attack
from polyclinic.audits.views import Finding, NotTried, Planted, Seen, Truth

#: the chance that an audit of a run without leaks says "leaks" anywhere, over all its tests
FALSE_ALARMS = 0.01

#: a result that chance gives less often than this, and that is no leak yet, is not called withstood
SUSPECT = 0.05
#: figures that say how often chance does as well
CHANCES = ("told_by_chance", "picked_by_chance", "order_by_chance", "closer_by_chance", "p_members_closer")

#: how an attack is run on a parcel: the audit's own, which survives too little memory
Run = Callable[[Seen, Truth], list[Finding | NotTried]]


@dataclass(frozen=True)
class PowerCheck:
    """Whether an attack found a planted leak, with what figures, in how many seconds."""

    attack: str
    leak: str
    words: str
    found: bool
    evidence: dict[str, float | int | str] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class CheckedFinding:
    """A finding with its power checks. Where it is a leak, there is nothing to check."""

    finding: Finding
    power: tuple[PowerCheck, ...]
    seconds: float

    @property
    def word(self) -> Word:
        if self.finding.verdict.leak:
            return LEAKS
        earned = self.power and all(check.found for check in self.power) and not self.finding.doubt
        return WITHSTOOD if earned else NOT_TESTED


def run_with_power(attack: Attack, seen: Seen, truth: Truth, run: Run) -> list[CheckedFinding | NotTried]:
    """Run an attack on a parcel, and where one of its findings is no leak, on what it plants."""
    begin = time.perf_counter()
    results = [with_doubt(one) if isinstance(one, Finding) else one for one in run(seen, truth)]
    took = time.perf_counter() - begin
    silent = [one for one in results if isinstance(one, Finding) and not one.verdict.leak and not one.doubt]
    checks = [check for planted in attack.planted(seen, truth) for check in _check(planted, run)] if silent else []
    return [
        one if isinstance(one, NotTried) else CheckedFinding(one, _of_attack(one.attack, checks), took)
        for one in results
    ]


def with_doubt(found: Finding) -> Finding:
    """A finding that is no leak, and yet more than chance gives, leaves a doubt."""
    chance = min(float(found.verdict.evidence.get(name, 1.0)) for name in CHANCES)
    if found.verdict.leak or found.doubt or chance >= SUSPECT:
        return found
    words = f"chance does as well in {chance:.2g} of cases only: too little for a leak, too much for none"
    return replace(found, doubt=f"{words}; try a larger budget")


def _check(planted: Planted, run: Run) -> list[PowerCheck]:
    """What each attack found of a planted leak. One that is not tried on it found nothing."""
    begin = time.perf_counter()
    results = run(planted.seen, planted.truth)
    took = time.perf_counter() - begin
    return [
        PowerCheck(
            one.attack,
            planted.leak,
            planted.words,
            isinstance(one, Finding) and one.verdict.leak,
            one.verdict.evidence if isinstance(one, Finding) else {},
            took,
        )
        for one in results
        if planted.question in ("", one.question)
    ]


def _of_attack(name: str, checks: Sequence[PowerCheck]) -> tuple[PowerCheck, ...]:
    return tuple(check for check in checks if check.attack == name)
