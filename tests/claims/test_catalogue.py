"""Every claim: valid studies at each scale, a rule about its own arms, a page that is up to date."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from polyclinic.claims.catalogue import CLAIMS, find_claim
from polyclinic.claims.claim import SCALES, Claim
from polyclinic.claims.page import RECORDS, is_stale, page, reason, records
from polyclinic.claims.reproduce import STUDIES, plan, slug
from polyclinic.claims.rules import AllOf, Provided, Rule
from polyclinic.errors import BadInput

DOCS = Path(__file__).parents[2] / "docs"


def parts_of(rule: Rule) -> list[Rule]:
    if isinstance(rule, Provided):
        return [*parts_of(rule.condition), *parts_of(rule.rule)]
    return [part for one in rule.parts for part in parts_of(one)] if isinstance(rule, AllOf) else [rule]


def test_there_are_at_least_thirty_claims_of_all_papers() -> None:
    assert len(CLAIMS) >= 30
    assert len({claim.paper for claim in CLAIMS.values()}) == 5


@pytest.mark.parametrize("name", CLAIMS)
def test_the_studies_of_a_claim_are_valid(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYCLINIC_DATA", str(tmp_path))
    claim = CLAIMS[name]
    for scale in SCALES:
        for phantom in [False, True] if claim.phantom else [False]:
            planned = plan(claim, tmp_path, scale, 1, phantom=phantom)
            assert list(planned) == list(claim.arms)
    assert len({slug(label) for label in claim.arms}) == len(claim.arms)


@pytest.mark.parametrize("name", CLAIMS)
def test_a_rule_asks_about_arms_that_the_claim_has(name: str) -> None:
    claim = CLAIMS[name]
    for part in parts_of(claim.rule):
        asked = {value for key, value in dataclasses.asdict(part).items() if key in ("first", "second", "label")}
        assert not claim.arms or asked <= {*claim.arms, "all arms"}
    assert {number.label for number in claim.numbers} <= set(claim.arms) or not claim.arms


def test_every_study_is_used() -> None:
    assert {file.name for file in STUDIES.glob("*.toml")} == {claim.study for claim in CLAIMS.values() if claim.study}


def test_quick_claims_take_at_most_fifteen_minutes() -> None:
    def cpu(claim: Claim) -> float:
        return claim.minutes["quick"].cpu or 0

    assert max(map(cpu, CLAIMS.values())) <= 15


def test_an_unknown_claim_gets_a_hint() -> None:
    with pytest.raises(BadInput, match="did you mean 'qu-table1-forgetting'"):
        find_claim("qu-table1-forgeting")


def test_the_page_is_what_the_records_say() -> None:
    assert (DOCS / "claims.md").read_text(encoding="utf-8") == page(), "run python docs/building/claims_page.py"


def test_the_scoreboard_has_every_claim_once() -> None:
    board = page().split("## ")[0]
    for claim in CLAIMS.values():
        assert board.count(f"{claim.name.partition('-')[2]}](#{claim.decides or claim.name})") == 1


def test_the_page_begins_with_how_many_claims_came_to_each_verdict() -> None:
    head = page().split("This page is")[0]
    numbers = [[int(cell) for cell in line.split("|")[2:-1]] for line in head.splitlines()[4:] if line]
    found = [(one["scale"], one["holds"]) for one in records(RECORDS).values()]
    verdicts = [(scale, holds) for scale in ("quick", "full") for holds in ("yes", "no", "not enough data")]
    assert [sum(column) for column in zip(*numbers, strict=True)] == [found.count(one) for one in verdicts]


def test_an_experiment_is_about_a_claim_that_is_there_and_its_rule_came_first() -> None:
    experiments = [claim for claim in CLAIMS.values() if claim.decides]
    assert len(experiments) >= 7
    assert {claim.decides for claim in experiments} <= set(CLAIMS)
    assert not any(claim.post_hoc for claim in experiments if claim.arms)  # arithmetic may have been known


def test_records_are_of_claims_and_rules_that_are_still_there() -> None:
    for (name, scale), found in records(RECORDS).items():
        assert found["rule"] == CLAIMS[name].rule.words, f"{name}, {scale}: the rule has changed since; run it again"


def test_a_reason_is_found_where_an_experiment_says_yes() -> None:
    experiments = [claim for claim in CLAIMS.values() if claim.decides == "qu-figure5-retina-high"]
    first, second, _ = (claim.name for claim in experiments)
    kept = {(first, "quick"): {"holds": "no"}}
    assert reason(experiments, kept).startswith(f"reason not found ({first}: no; ")
    kept[second, "quick"] = {"holds": "yes"}
    assert reason(experiments, kept).startswith(f"a reason was found ({second}: yes; {first}: no; ")


def test_a_record_of_another_study_is_stale() -> None:
    claim = CLAIMS["ours-one-site"]
    changes = {label: list(claim.changes(label, "quick", phantom=False)) for label in claim.arms}
    found = {"claim": claim.name, "scale": "quick", "phantom": False, "changes": changes}
    assert not is_stale(found)
    assert is_stale(found | {"changes": {**changes, "fedavg": ["method.rounds=99"]}})


def test_every_claim_with_experiments_says_what_they_have_shown() -> None:
    asked = {claim.decides for claim in CLAIMS.values() if claim.decides}
    assert {claim.name for claim in CLAIMS.values() if claim.finding} == asked
    told = " ".join(page().split())
    assert all(CLAIMS[name].finding in told for name in asked)
