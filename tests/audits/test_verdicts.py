"""Verdicts of kinds of parcel, and the power that earns them."""

import time
from typing import Any, ClassVar

import pytest

from polyclinic.attacks.attack import LEAKS, NOT_TESTED, WITHSTOOD, Verdict
from polyclinic.audits.attack import EVERY_QUESTION, Attack, Finding, NotTried, Planted
from polyclinic.audits.audit import Clock, run_attack
from polyclinic.audits.verdicts import CheckedFinding, run_with_power, verdicts


def planted(found: bool, leak: str = "weak", attack: str = "inversion") -> dict[str, Any]:
    return {"attack": attack, "leak": leak, "words": f"a {leak} leak", "found": found, "evidence": {}, "seconds": 1.0}


def finding(attack: str, verdict: str, words: str, **more: Any) -> dict[str, Any]:
    given = {"question": "images", "power": [], "doubt": "", "seconds": 2.0, "picture": f"{words}.png"}
    known = {name: more.pop(name) for name in list(more) if name in given}
    return {"attack": attack, "verdict": verdict, "words": words, "evidence": more, **given, **known}


def parcel(*findings: dict[str, Any], kind: str = "weights", not_tried: tuple = ()) -> dict[str, Any]:
    told = {"findings": list(findings), "not_tried": list(not_tried)}
    return {"kind": kind, **told, "digests": ["d"], "sites": ["site-1"]}


def lines(kind: str, count: int) -> dict[str, list[dict[str, str]]]:
    return {"site-1": [{"kind": kind}] * count}


def question_of(*findings: dict[str, Any], not_tried: tuple = (), name: str = "images") -> dict[str, Any]:
    return verdicts([parcel(*findings, not_tried=not_tried)], lines("weights", 1))["weights"]["questions"][name]


def gap(question: str = "images", excluded: bool = False) -> dict[str, Any]:
    return {"attack": "other", "why": "it lacks something", "question": question, "excluded": excluded}


def test_the_strongest_finding_speaks_for_all_unless_an_attack_was_cut_off():
    parcels = [
        parcel(finding("inversion", NOT_TESTED, "none", recovered=0), finding("loss", NOT_TESTED, "flat", auc=0.5)),
        parcel(finding("inversion", LEAKS, "one", recovered=1), finding("loss", NOT_TESTED, "even", auc=0.52)),
        parcel(finding("inversion", LEAKS, "five", recovered=5), finding("loss", NOT_TESTED, "low", auc=0.4)),
    ]
    found = verdicts(parcels, lines("weights", 3))["weights"]
    assert found["verdict"] == LEAKS
    assert found["words"] == "inversion (leaks in 2 of 3 parcels; the strongest): five"
    assert found["evidence"] == {"inversion": {"recovered": 5}}
    assert found["pictures"] == ["five.png"]
    # Out of time or memory: nobody knows what it would have found.
    held = finding("inversion", WITHSTOOD, "none", power=[planted(True)])
    assert question_of(held)["verdict"] == WITHSTOOD
    found = verdicts([parcel(held), parcel(held, not_tried=(gap(EVERY_QUESTION),))], lines("weights", 2))["weights"]
    assert found["verdict"] == found["questions"]["images"]["verdict"] == NOT_TESTED
    assert "it lacks something" in found["questions"]["images"]["why"]
    leak = finding("inversion", LEAKS, "one", recovered=1)
    assert question_of(leak, not_tried=(gap(EVERY_QUESTION),))["verdict"] == LEAKS


@pytest.mark.parametrize(("power", "doubt", "word"), [
    ([], "", NOT_TESTED),
    ([planted(True)], "", WITHSTOOD),
    ([planted(False)], "", NOT_TESTED),
    ([planted(True)], "the search had not ended", NOT_TESTED),
    ([planted(True), planted(False, "weaker")], "", NOT_TESTED),
    ([planted(False), planted(True)], "", WITHSTOOD),  # one attack finds the leak that another misses
])  # fmt: skip
def test_withstood_is_earned_by_finding_what_was_planted(power, doubt, word):
    found = question_of(finding("inversion", NOT_TESTED, "none", power=power, doubt=doubt))
    assert found["verdict"] == word
    assert found["why"]


def test_one_question_or_parcel_that_is_open_is_not_hidden_by_another():
    good = finding("inversion", WITHSTOOD, "none", power=[planted(True)])
    for missing, word in ((gap("membership"), NOT_TESTED), (gap("membership", excluded=True), WITHSTOOD)):
        found = verdicts([parcel(good, not_tried=(missing,))], lines("weights", 1))["weights"]
        assert found["verdict"] == word
        assert found["questions"]["images"]["verdict"] == WITHSTOOD
    good = parcel(finding("inversion", WITHSTOOD, "none", power=[planted(True)]))
    weak = parcel(finding("inversion", NOT_TESTED, "none", power=[planted(False)]))
    assert verdicts([good, good], lines("weights", 2))["weights"]["verdict"] == WITHSTOOD
    assert verdicts([good, weak], lines("weights", 2))["weights"]["verdict"] == NOT_TESTED


def test_what_nobody_tried_or_attacked_is_said():
    found = verdicts([parcel(finding("inversion", NOT_TESTED, "none"), not_tried=(gap(),))], lines("weights", 6))
    assert found["weights"]["not_tried"] == ["other: it lacks something", "5 of 6 parcels that left"]
    found = verdicts([], {**lines("latents", 2), "site-2": [{"kind": "metrics"}, {"kind": "labels"}, {"kind": "keys"}]})
    assert found["latents"]["verdict"] == NOT_TESTED
    assert found["latents"]["words"] == "no parcel of this kind was attacked"
    assert [found[kind]["verdict"] for kind in ("metrics", "labels", "keys")] == [NOT_TESTED, LEAKS, NOT_TESTED]


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
    (found,) = run_with_power(attack, seen, None)  # type: ignore[arg-type]
    assert isinstance(found, CheckedFinding)
    return found


@pytest.mark.parametrize(("chance", "word"), [(0.006, NOT_TESTED), (0.2, WITHSTOOD)])
def test_what_chance_hardly_does_is_not_withstood(chance, word):
    class Suspect(Threshold):
        def attack(self, seen: Any, truth: Any) -> list[Finding | NotTried]:
            return [Finding("threshold", "", Verdict(seen > self.threshold, "", {"told_by_chance": chance}))]

    found = checked(Suspect(0.5, 0.6), 0.1)
    assert found.word == word
    assert ("0.006 of cases only" in found.finding.doubt) == (word == NOT_TESTED)


class Slow(Attack):
    kinds = ("weights",)
    questions = ("images",)

    def attack(self, seen: Any, truth: Any) -> list[Any]:
        time.sleep(60)
        return []


class Quick(Slow):
    def attack(self, seen: Any, truth: Any) -> list[Any]:
        return [NotTried("quick", "has nothing to say")]


def test_an_attack_that_takes_long_is_cut_and_the_others_still_run():
    clock, begin = Clock(0.5 / 60), time.monotonic()
    (cut,) = run_attack("slow", Slow, None, None, clock)
    assert time.monotonic() - begin < 10
    assert (cut.attack, cut.question) == ("slow", "images")
    assert "a quarter of what the budget had left" in cut.why
    (said,) = run_attack("quick", Quick, None, None, Clock(1))
    assert said.why == "has nothing to say"
    (late,) = run_attack("quick", Quick, None, None, Clock(1e-9))
    assert "used up" in late.why


HELD = finding("inversion", WITHSTOOD, "none", power=[planted(True)])


@pytest.mark.parametrize(("attacked", "left_by", "open_ones"), [
    ([{"sites": ["a"]}], {"a": ["train"], "b": ["train"]}, "what b sent was not attacked"),
    ([{"sites": ["a"]}, {"sites": ["b"]}], {"a": ["train"], "b": ["train"]}, ""),
    ([{"sites": ["a", "b"]}], {"a": ["train"], "b": ["train"]}, ""),
    ([{"sites": ["a"]}], {"a": ["train"], "b": []}, ""),  # which sent no weights
    ([{"operation": "train"}], {"site-1": ["train", "give"]}, "what left by give was not attacked"),
    ([{"operation": "train"}, {"operation": "give"}], {"site-1": ["train", "give"]}, ""),
])  # fmt: skip
def test_whatever_nobody_attacked_has_not_withstood(attacked, left_by, open_ones):
    lines = {
        site: [{"kind": "weights", "operation": one} for one in operations] or [{"kind": "metrics", "operation": "say"}]
        for site, operations in left_by.items()
    }
    found = verdicts([{**parcel(HELD), "operation": "train", **one} for one in attacked], lines)["weights"]
    assert found["verdict"] == (NOT_TESTED if open_ones else WITHSTOOD)
    assert open_ones in found["words"]
    if open_ones.startswith("what b"):
        assert WITHSTOOD not in [one["verdict"] for one in found["questions"].values()]


@pytest.mark.parametrize(("seen", "weakest", "doubt", "word"), [
    *((0.1, 0.6, "", WITHSTOOD), (0.1, 0.4, "", NOT_TESTED), (0.1, None, "", NOT_TESTED)),
    *((0.1, 0.6, "not ended", NOT_TESTED), (0.1, "unreadable", "", NOT_TESTED), (0.9, 0.6, "", LEAKS)),
])  # fmt: skip
def test_nothing_found_is_withstood_only_with_power_which_the_same_attack_shows(seen, weakest, doubt, word):
    attack = Threshold(0.5, weakest, doubt)
    found = checked(attack, seen)
    assert found.word == word
    planted = [weakest] * (weakest is not None and seen < 0.5 and not doubt)  # a leak, or a doubt, needs no power
    assert attack.ran == [seen, *planted]
    told = [("weak", weakest > 0.5, {"seen": weakest})] if planted and weakest != "unreadable" else []
    assert [(one.leak, one.found, one.evidence) for one in found.power if one.evidence] == told
    (untried,) = run_with_power(attack, "unreadable", None)
    assert isinstance(untried, NotTried)
