"""Verdicts: *leaks*, *withstood* (with the power shown) or *not tested*, of a finding and of each kind of parcel.

"Withstood" is earned. Of each attack that finds nothing, the audit plants the weakest leaks that the verdict would
exclude, and runs the very same attack with the very same budget on them. A kind is asked several questions: do images
come back, can one tell who was trained on, ... Each question gets a verdict of its own, and a kind the gravest of them:
one leak is a leak, and one question without an answer leaves it not tested.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from polyclinic.attacks.attack import GRAVEST, LEAKS, NOT_TESTED, WITHSTOOD, Word
from polyclinic.audits.attack import EVERY_QUESTION, Attack, Finding, NotTried, Planted, Seen
from polyclinic.audits.truth import Truth
from polyclinic.json_types import JsonMapping, JsonObject

#: the chance that an audit of a run without leaks says "leaks" anywhere, over all its tests
FALSE_ALARMS = 0.01
#: a result that chance gives less often than this, and that is no leak yet, is not called withstood
SUSPECT = 0.05
#: figures that say how often chance does as well
CHANCES = ("told_by_chance", "picked_by_chance", "order_by_chance", "closer_by_chance", "p_members_closer")


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


def run_with_power(attack: Attack, seen: Seen, truth: Truth, doubt: str = "") -> list[CheckedFinding | NotTried]:
    """Run an attack on a parcel, and where one of its findings is no leak, on what it plants. `doubt`: why none of its
    findings would say anything."""
    begin = time.perf_counter()
    results = [with_doubt(one, doubt) if isinstance(one, Finding) else one for one in attack.attack(seen, truth)]
    took = time.perf_counter() - begin
    silent = [one for one in results if isinstance(one, Finding) and not one.verdict.leak and not one.doubt]
    checks = [check for planted in attack.planted(seen, truth) for check in _check(attack, planted)] if silent else []
    return [
        one
        if isinstance(one, NotTried)
        else CheckedFinding(one, tuple(check for check in checks if check.attack == one.attack), took)
        for one in results
    ]


def with_doubt(found: Finding, doubt: str = "") -> Finding:
    """A finding that is no leak, and yet more than chance gives, leaves a doubt."""
    if doubt and not found.verdict.leak:
        return replace(found, doubt=doubt)
    chance = min(float(found.verdict.evidence.get(name, 1.0)) for name in CHANCES)
    if found.verdict.leak or found.doubt or chance >= SUSPECT:
        return found
    words = f"chance does as well in {chance:.2g} of cases only: too little for a leak, too much for none"
    return replace(found, doubt=f"{words}; try a larger budget")


def _check(attack: Attack, planted: Planted) -> list[PowerCheck]:
    """What each attack found of a planted leak. One that is not tried on it found nothing."""
    begin = time.perf_counter()
    results = attack.attack(planted.seen, planted.truth)
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


#: kinds that need no attack to be read, or get none: the verdict, and what left
NOT_ATTACKED: dict[str, tuple[Word, str]] = {
    "real-images": (LEAKS, "real images left the site as they are"),
    "labels": (LEAKS, "labels of single images left the site as they are"),
    "masks": (LEAKS, "masks of single images left the site as they are"),
    "statistics": (NOT_TESTED, "sums and counts left the site"),
    "metrics": (NOT_TESTED, "sums of scores left the site"),
    "keys": (NOT_TESTED, "public keys left the site; they are drawn at random and not made of images"),
    "shares": (NOT_TESTED, "shares of the secrets behind masks left the site; they are drawn at random, too"),
}
#: figures that grow with a leak, the weightiest first
STRENGTH = ("recovered", "copies", "auc", "told", "psnr")


def verdicts(
    parcels: Sequence[JsonMapping], lines: Mapping[str, Sequence[JsonMapping]], patients: JsonMapping | None = None
) -> JsonObject:
    """By kind that left any site: its verdict, in a sentence, with the evidence of the strongest finding. `patients`:
    what a test of single patients found, if there was one."""
    left = Counter(line["kind"] for of_site in lines.values() for line in of_site)
    found: JsonObject = {}
    for kind, count in sorted(left.items()):
        of_kind = [parcel for parcel in parcels if parcel["kind"] == kind]
        if kind in NOT_ATTACKED and not of_kind:
            word, words = NOT_ATTACKED[kind]
            times = "once" if count == 1 else f"{count} times"
            found[kind] = {"left": count, "verdict": word, "words": f"{words} ({times})", "not_tried": []}
        else:
            sent = [site for site, of_site in lines.items() if any(line["kind"] == kind for line in of_site)]
            said = _with_other_operations({"left": count, **_verdict_of_attacks(count, of_kind)}, kind, lines, of_kind)
            found[kind] = _with_patients(_with_other_sites(said, sent, of_kind), patients)
    return found


def _with_patients(found: JsonObject, patients: JsonMapping | None) -> JsonObject:
    """A test over all members says nothing of single patients: it never makes membership withstood. Where a patient is
    told apart by the final model, what it was made of leaks."""
    member = found.get("questions", {}).get("membership")
    if member is None or member["verdict"] == LEAKS:
        return found
    word, why = member["verdict"], member["why"]
    if patients is not None and patients["verdict"] == LEAKS:
        word, why = LEAKS, f"single patients, by the final model: {patients['words']}"
    elif word == WITHSTOOD:
        open_why = "single patients were not tested (polyclinic audit RUN --patients does)"
        if patients is not None:
            open_why = f"of single patients only the final model was tested ({patients['verdict']}), and not this kind"
        word, why = NOT_TESTED, f"{open_why}; the average member: {why}"
    questions = {**found["questions"], "membership": {**member, "verdict": word, "why": why}}
    return {**found, "questions": questions, "verdict": gravest([found["verdict"], word])}


def _with_other_operations(
    found: JsonObject, kind: str, lines: Mapping[str, Sequence[JsonMapping]], parcels: Sequence[JsonMapping]
) -> JsonObject:
    """A kind of which another operation let out parcels as well has not withstood: nobody looked at those."""
    left = {line.get("operation") for of_site in lines.values() for line in of_site if line["kind"] == kind}
    others = sorted(str(one) for one in left - {parcel.get("operation") for parcel in parcels} if one)
    if not others or found["verdict"] != WITHSTOOD:
        return found
    why = f"what left by {', '.join(others)} was not attacked"
    return {**_left_open(found, why), "operations_not_tested": others}


def _with_other_sites(found: JsonObject, sent: Sequence[str], parcels: Sequence[JsonMapping]) -> JsonObject:
    """A kind that other sites sent as well has not withstood there: nobody looked."""
    attacked = {site for parcel in parcels for site in parcel.get("sites", [parcel.get("site")])}
    others = [site for site in sent if site not in attacked]
    if not others or found["verdict"] != WITHSTOOD:
        return {**found, "sites_not_tested": others}
    why = f"what {', '.join(others)} sent was not attacked (a larger budget attacks all sites)"
    return {**_left_open(found, why), "sites_not_tested": others}


def _left_open(found: JsonObject, why: str) -> JsonObject:
    """A kind of which something was not looked at has withstood no question."""
    questions = {
        name: {**one, "verdict": NOT_TESTED, "why": why} if one["verdict"] == WITHSTOOD else one
        for name, one in found["questions"].items()
    }
    return {**found, "verdict": NOT_TESTED, "questions": questions, "words": f"{why}. {found['words']}"}


def _verdict_of_attacks(left: int, parcels: Sequence[JsonMapping]) -> JsonObject:
    findings = [f for parcel in parcels for f in parcel["findings"]]
    untried = sorted({f"{n['attack']}: {n['why']}" for parcel in parcels for n in parcel["not_tried"]})
    others = left - sum(len(parcel["digests"]) for parcel in parcels)
    rest = [*untried, *([f"{others} of {left} parcels that left"] if others > 0 and parcels else [])]
    if not findings:
        reasons = f" ({'; '.join(untried)})" if untried else ""
        why = f"no attack could be run on it{reasons}" if parcels else "no parcel of this kind was attacked"
        return {"verdict": NOT_TESTED, **_attacked(parcels), "words": why, "not_tried": rest}
    cut_off = [n for parcel in parcels for n in parcel["not_tried"] if n["question"] == EVERY_QUESTION]
    asked = [f["question"] for f in findings]
    asked += [n["question"] for parcel in parcels for n in parcel["not_tried"] if not n["excluded"]]
    names = [name for name in dict.fromkeys(asked) if name != EVERY_QUESTION]
    questions = {name: _with_gaps(question_verdict(name, parcels), cut_off) for name in names}
    word = gravest([one["verdict"] for one in questions.values()])
    shown = _strongest_of_each([f for f in findings if f["verdict"] == LEAKS] or findings)
    return {
        "verdict": word, **_attacked(parcels), "questions": questions,
        "words": " ".join(f"{f['attack']}{_in_how_many(f, findings)}: {f['words']}" for f in shown),
        "power": [check for f in shown for check in f["power"]],
        "evidence": {f["attack"]: f["evidence"] for f in shown},
        "pictures": [path for f in shown for path in (f["picture"], f.get("trajectory", {}).get("picture")) if path],
        "not_tried": rest,
    }  # fmt: skip


def _attacked(parcels: Sequence[JsonMapping]) -> JsonObject:
    """How many that left were attacked, and how often the released model was, which is no parcel (it has no digest)."""
    left = sum(bool(parcel["digests"]) for parcel in parcels)
    return {"attacked": left, **({"released": len(parcels) - left} if len(parcels) > left else {})}


def _with_gaps(found: JsonObject, cut_off: Sequence[JsonMapping]) -> JsonObject:
    """A question is not answered while an attack that may ask it was cut off, unless a leak is there already."""
    if found["verdict"] != WITHSTOOD or not cut_off:
        return found
    return {**found, "verdict": NOT_TESTED, "why": f"{cut_off[0]['attack']}: {cut_off[0]['why']}"}


# --- one question ---------------------------------------------------------------------------------------


def question_verdict(question: str, parcels: Sequence[JsonMapping]) -> JsonObject:
    """The gravest verdict over all parcels, the attacks behind it, what they cost, and why it is not better."""
    answers = [answer for parcel in parcels if (answer := _answer_of_parcel(question, parcel))]
    word = gravest([word for word, _ in answers])
    asked = [f for parcel in parcels for f in parcel["findings"] if f["question"] == question]
    return {
        "verdict": word, "attacks": sorted({f["attack"] for f in asked}),
        "seconds": round(sum(f["seconds"] for f in asked), 1),
        "leaking": sum(answer == LEAKS for answer, _ in answers), "parcels": len(answers),
        "why": next(why for answer, why in answers if answer == word),
    }  # fmt: skip


def _answer_of_parcel(question: str, parcel: JsonMapping) -> tuple[Word, str] | None:
    """The verdict of one question about one parcel, and why; None where nothing asked it."""
    findings = [f for f in parcel["findings"] if f["question"] == question]
    gaps = [n for n in parcel["not_tried"] if n["question"] == question and not n["excluded"]]
    leaks = [f for f in findings if f["verdict"] == LEAKS]
    if leaks:
        return LEAKS, leaks[0]["words"]
    if not findings:
        return (NOT_TESTED, gaps[0]["why"]) if gaps else None
    doubts = [f["doubt"] for f in findings if f["doubt"]]
    if doubts:
        return NOT_TESTED, doubts[0]
    return _power_of([check for f in findings for check in f["power"]])


def _power_of(checks: Sequence[JsonMapping]) -> tuple[Word, str]:
    """Withstood if every planted leak was found by one attack at least."""
    if not checks:
        return NOT_TESTED, "no leak could be planted to see whether these attacks would find one"
    by_leak: dict[str, list[JsonMapping]] = {}
    for check in checks:
        by_leak.setdefault(check["leak"], []).append(check)
    missed = [of_leak[0]["words"] for of_leak in by_leak.values() if not any(check["found"] for check in of_leak)]
    if missed:
        return NOT_TESTED, f"this budget does not find a planted leak either ({missed[0]}); try a larger one"
    planted = "; ".join(of_leak[0]["words"] for of_leak in by_leak.values())
    return WITHSTOOD, f"nothing was found, and the same attacks find a planted leak ({planted})"


def gravest(words: Sequence[Word]) -> Word:
    """One leak is a leak; one question without an answer leaves the rest not tested."""
    return next((word for word in GRAVEST if word in words), NOT_TESTED)


# --- the strongest evidence -----------------------------------------------------------------------------


def _strongest_of_each(findings: Sequence[JsonMapping]) -> list[JsonMapping]:
    """Of each attack the finding with the most to show; the first of those that are alike."""

    def strength(finding: JsonMapping) -> tuple[float, ...]:
        return tuple(finding["evidence"].get(figure) or 0 for figure in STRENGTH)

    names = dict.fromkeys(finding["attack"] for finding in findings)
    return [max((one for one in findings if one["attack"] == name), key=strength) for name in names]


def _in_how_many(finding: JsonMapping, findings: Sequence[JsonMapping]) -> str:
    """In how many of several parcels the same attack found a leak; the words are those of one parcel."""
    same = [f["verdict"] == LEAKS for f in findings if f["attack"] == finding["attack"]]
    return f" (leaks in {sum(same)} of {len(same)} parcels; the strongest)" if len(same) > 1 else ""


def count_of(count: int, noun: str) -> str:
    """Such as "1 image" or "2 images"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
