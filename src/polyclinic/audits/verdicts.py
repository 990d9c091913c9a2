"""Verdicts for each kind of parcel, in words: what attacks found, what the ledger alone shows, what was not tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from polyclinic.json_types import JsonMapping, JsonObject

#: kinds that need no attack to be read, or get none: whether they leak (None: nobody looked), and what left
NOT_ATTACKED: dict[str, tuple[bool | None, str]] = {
    "real-images": (True, "real images left the site as they are"),
    "labels": (True, "labels of single images left the site as they are"),
    "masks": (True, "masks of single images left the site as they are"),
    "statistics": (None, "sums and counts left the site"),
    "metrics": (None, "sums of scores left the site"),
    "keys": (False, "public keys, which hold nothing of images"),
}
#: figures that grow with a leak, the weightiest first
STRENGTH = ("recovered", "copies", "auc", "told", "psnr")
#: what no attack of this house tries, by kind
NEVER_TRIED = {
    "weights": [
        "attacks that join several rounds",
        "a coordinator that changes the weights it sends",
        "shadow models (LiRA), each a training of its own",
    ],
    "gradients": [
        "attacks that join several rounds",
        "a coordinator that changes the weights it sends",
        "membership inference from gradients",
    ],
    "activations": ["a decoder trained on images of the attacker's own", "membership inference from activations"],
    "latents": ["a decoder trained on images of the attacker's own", "membership inference from latents"],
    "generator": ["shadow generators", "the discriminator, which was not sent"],
    "codes": [],
    "synthetic-images": ["shadow generators"],
}


def verdicts(parcels: Sequence[JsonMapping], lines: Mapping[str, Sequence[JsonMapping]]) -> JsonObject:
    """By kind that left any site: whether it leaks, in a sentence, with the evidence of the strongest finding."""
    left = Counter(line["kind"] for of_site in lines.values() for line in of_site)
    found: JsonObject = {}
    for kind, count in sorted(left.items()):
        if kind in NOT_ATTACKED:
            leak, words = NOT_ATTACKED[kind]
            found[kind] = {"left": count, "leak": leak, "words": f"{words} ({_times(count)})", "not_tried": []}
        else:
            found[kind] = {"left": count, **_verdict_of_attacks(kind, count, [p for p in parcels if p["kind"] == kind])}
    return found


def _verdict_of_attacks(kind: str, left: int, parcels: Sequence[JsonMapping]) -> JsonObject:
    findings = [f for parcel in parcels for f in parcel["findings"]]
    untried = {f"{n['attack']}: {n['why']}" for parcel in parcels for n in parcel["not_tried"]}
    others = left - sum(len(parcel["digests"]) for parcel in parcels)
    untouched = [f"{others} of {left} parcels that left"] if others > 0 and parcels else []
    rest = [*sorted(untried), *untouched, *NEVER_TRIED.get(kind, [])]
    if not findings:
        reasons = f" ({'; '.join(sorted(untried))})" if untried else ""
        why = f"no attack could be run on it{reasons}" if parcels else "no parcel of this kind was attacked"
        return {"leak": None, "attacked": len(parcels), "words": why, "not_tried": rest}
    leaks = [f for f in findings if f["leak"]]
    shown = _strongest_of_each(leaks or findings)
    return {
        "leak": bool(leaks),
        "attacked": len(parcels),
        "words": " ".join(f"{f['attack']}{_in_how_many(f, findings)}: {f['words']}" for f in shown),
        "evidence": {f["attack"]: f["evidence"] for f in shown},
        "pictures": [path for f in shown for path in _pictures(f)],
        "not_tried": rest,
    }


def _pictures(finding: JsonMapping) -> list[str]:
    """What was drawn: the result, and the steps of the search where they were kept."""
    drawn = [finding["picture"], finding.get("trajectory", {}).get("picture")]
    return [path for path in drawn if path]


def _strongest_of_each(findings: Sequence[JsonMapping]) -> list[JsonMapping]:
    """Of each attack the finding with the most to show; the first of those that are alike."""
    by_attack: dict[str, JsonMapping] = {}
    for finding in findings:
        best = by_attack.setdefault(finding["attack"], finding)
        if _strength(finding) > _strength(best):
            by_attack[finding["attack"]] = finding
    return list(by_attack.values())


def _strength(finding: JsonMapping) -> tuple[float, ...]:
    return tuple(finding["evidence"].get(figure) or 0 for figure in STRENGTH)


def _in_how_many(finding: JsonMapping, findings: Sequence[JsonMapping]) -> str:
    """In how many of several parcels the same attack found a leak; the words are those of one parcel."""
    same = [f["leak"] for f in findings if f["attack"] == finding["attack"]]
    return f" (leaks in {sum(same)} of {len(same)} parcels; the strongest)" if len(same) > 1 else ""


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def count_of(count: int, noun: str) -> str:
    """Such as "1 image" or "2 images"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
