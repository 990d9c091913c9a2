"""What an audit says of each kind: the strongest evidence, in how many parcels, and what nobody tried."""

from __future__ import annotations

from typing import Any

from polyclinic.audits.verdicts import verdicts


def finding(attack: str, leak: bool, words: str, **evidence: float) -> dict[str, Any]:
    return {"attack": attack, "leak": leak, "words": words, "evidence": evidence, "picture": f"{words}.png"}


def parcel(*findings: dict[str, Any], kind: str = "weights", not_tried: tuple = ()) -> dict[str, Any]:
    return {"kind": kind, "findings": list(findings), "not_tried": list(not_tried), "digests": ["d"]}


def lines(kind: str, count: int) -> dict[str, list[dict[str, str]]]:
    return {"site-1": [{"kind": kind}] * count}


def test_the_strongest_finding_speaks_for_all():
    parcels = [
        parcel(finding("inversion", False, "none", recovered=0), finding("loss", False, "flat", auc=0.5)),
        parcel(finding("inversion", True, "one", recovered=1), finding("loss", False, "even", auc=0.52)),
        parcel(finding("inversion", True, "five", recovered=5), finding("loss", False, "low", auc=0.4)),
    ]
    found = verdicts(parcels, lines("weights", 3))["weights"]
    assert found["leak"] is True
    assert found["words"] == "inversion (leaks in 2 of 3 parcels; the strongest): five"
    assert found["evidence"] == {"inversion": {"recovered": 5}}
    assert found["pictures"] == ["five.png"]


def test_without_a_leak_every_attack_is_told():
    parcels = [parcel(finding("inversion", False, "none", recovered=0), finding("loss", False, "flat", auc=0.5))]
    found = verdicts(parcels, lines("weights", 1))["weights"]
    assert found["leak"] is False
    assert found["words"] == "inversion: none loss: flat"
    assert list(found["evidence"]) == ["inversion", "loss"]


def test_what_was_not_tried_is_said():
    missing = {"attack": "loss-threshold", "why": "only a part of the network was sent"}
    found = verdicts([parcel(finding("inversion", False, "none"), not_tried=(missing,))], lines("weights", 6))
    assert found["weights"]["not_tried"] == [
        "loss-threshold: only a part of the network was sent",
        "5 of 6 parcels that left",
        "attacks that join several rounds",
        "a coordinator that changes the weights it sends",
        "shadow models (LiRA), each a training of its own",
    ]
    assert "shadow generators" in verdicts([parcel(kind="generator")], lines("generator", 1))["generator"]["not_tried"]


def test_kinds_that_nobody_attacked_are_no_clean_bill():
    found = verdicts([], {**lines("latents", 2), "site-2": [{"kind": "metrics"}, {"kind": "labels"}]})
    assert found["latents"]["leak"] is None
    assert found["latents"]["words"] == "no parcel of this kind was attacked"
    assert (found["metrics"]["leak"], found["labels"]["leak"]) == (None, True)
