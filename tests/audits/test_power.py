"""Power checks: an attack that finds nothing is run on what it planted, by the same code and budget."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from polyclinic.attacks.attack import LEAKS, NOT_TESTED, WITHSTOOD, Verdict
from polyclinic.audits.attack import Attack, Finding, NotTried, Planted
from polyclinic.audits.verdicts import CheckedFinding, run_with_power


class Threshold(Attack):
    """Sees a "parcel", which is a number here, where it is above a threshold."""

    kinds: ClassVar[tuple[str, ...]] = ("weights",)

    def __init__(self, threshold: float, weakest: float | None, doubt: str = "") -> None:
        self.threshold, self.weakest, self.doubt = threshold, weakest, doubt
        self.ran: list[Any] = []

    def attack(self, seen: Any, truth: Any) -> list[Finding | NotTried]:
        self.ran.append(seen)
        if seen == "unreadable":
            return [NotTried("threshold", "it cannot be read")]
        return [Finding("threshold", "", Verdict(seen > self.threshold, "", {"seen": seen}), doubt=self.doubt)]

    def planted(self, seen: Any, truth: Any) -> list[Planted]:
        return [] if self.weakest is None else [Planted("weak", "a weak leak", self.weakest, truth)]  # type: ignore


def checked(attack: Threshold, seen: Any) -> CheckedFinding:
    (found,) = run_with_power(attack, seen, None, attack.attack)  # type: ignore[arg-type]
    assert isinstance(found, CheckedFinding)
    return found


@pytest.mark.parametrize(
    ("weakest", "doubt", "word"),
    [(0.6, "", WITHSTOOD), (0.4, "", NOT_TESTED), (None, "", NOT_TESTED), (0.6, "not ended", NOT_TESTED)],
)
def test_nothing_found_is_withstood_only_with_power(weakest, doubt, word):
    assert checked(Threshold(0.5, weakest, doubt), 0.1).word == word


def test_a_leak_needs_no_power_check():
    attack = Threshold(0.5, 0.6)
    found = checked(attack, 0.9)
    assert (found.word, found.power, attack.ran) == (LEAKS, (), [0.9])


@pytest.mark.parametrize(("chance", "word"), [(0.006, NOT_TESTED), (0.2, WITHSTOOD)])
def test_what_chance_hardly_does_is_not_withstood(chance, word):
    class Suspect(Threshold):
        def attack(self, seen: Any, truth: Any) -> list[Finding | NotTried]:
            return [Finding("threshold", "", Verdict(seen > self.threshold, "", {"told_by_chance": chance}))]

    found = checked(Suspect(0.5, 0.6), 0.1)
    assert found.word == word
    assert ("0.006 of cases only" in found.finding.doubt) == (word == NOT_TESTED)


def test_the_planted_leak_is_attacked_by_the_same_code():
    attack = Threshold(0.5, 0.6)
    found = checked(attack, 0.1)
    assert attack.ran == [0.1, 0.6]
    assert [(check.leak, check.found, check.evidence) for check in found.power] == [("weak", True, {"seen": 0.6})]


def test_a_planted_leak_that_cannot_be_attacked_was_not_found():
    assert checked(Threshold(0.5, "unreadable"), 0.1).word == NOT_TESTED  # type: ignore[arg-type]


def test_what_was_not_tried_is_handed_on():
    attack = Threshold(0.5, 0.6)
    (found,) = run_with_power(attack, "unreadable", None, attack.attack)  # type: ignore[arg-type]
    assert isinstance(found, NotTried)
    assert attack.ran == ["unreadable"]
