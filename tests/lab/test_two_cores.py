"""CPU seconds of runs, and the minutes on two cores that follow from them."""

import json
from pathlib import Path

import pytest

from polyclinic.runner.compare.compare import Entry
from polyclinic_lab.claim import CLAIMS
from polyclinic_lab.judge import cpu_of_all, plan
from polyclinic_lab.measures import kept
from polyclinic_lab.origin import CPU, ORIGIN, RUN, add_cpu, cpu_of
from polyclinic_lab.two_cores import add, measured, minutes_on_two_cores, two_cores

CLAIM = CLAIMS["ours-one-site"]  # three arms, two seeds
WHERE = {"date": "2026-01-02", "machine": "2 cores, no GPU", "commit": "abc", "commit_given": False}


def note(run: Path, spent: dict[str, float] | None, **about: str) -> None:
    run.mkdir(parents=True, exist_ok=True)
    (run / ORIGIN).write_text(json.dumps({**WHERE, **about, **({} if spent is None else {CPU: spent})}))


@pytest.fixture
def planned(tmp_path: Path) -> dict[str, list[Entry]]:
    found = plan(CLAIM, tmp_path, "quick", None, phantom=False)
    for arm in found.values():
        for entry in arm:
            note(entry.folder, {RUN: 60.0, "audit.json": 30.0})
    return found


@pytest.mark.parametrize(
    ("spent", "machine", "seconds"),
    [
        ({RUN: 5.0, "audit.json": 1.5}, "2 cores, no GPU", 6.5),
        ({"audit.json": 5.0}, "2 cores, no GPU", None),  # resumed: nobody knows what the first part took
        (None, "2 cores, no GPU", None),
        ({RUN: 5.0}, "some GPU, 2 cores", None),
    ],
)
def test_cpu_seconds_of_a_run(
    tmp_path: Path, spent: dict[str, float] | None, machine: str, seconds: float | None
) -> None:
    note(tmp_path, spent, machine=machine)
    assert cpu_of(tmp_path) == seconds


def test_what_is_computed_of_a_run_is_noted_once_and_adds_up(tmp_path: Path) -> None:
    add_cpu(tmp_path, "audit.json", 2.0)
    assert not list(tmp_path.iterdir())  # a folder without a note gets none
    note(tmp_path, {RUN: 1.0})
    for _ in range(2):
        kept(tmp_path, "worth.json", lambda run: {"worth": 7})
        add_cpu(tmp_path, "audit.json", 2.0)
    found = json.loads((tmp_path / ORIGIN).read_text())[CPU]
    assert (list(found), found["audit.json"]) == ([RUN, "worth.json", "audit.json"], 4.0)


def test_a_claim_says_its_cpu_time_where_all_runs_do(planned: dict[str, list[Entry]]) -> None:
    entries = [entry for arm in planned.values() for entry in arm]
    assert cpu_of_all(entries, 1.0) == 6 * 90
    note(entries[-1].folder, None)
    assert cpu_of_all(entries, 1.0) is None
    assert cpu_of_all([], 1.0) == 1.0


def test_two_cores_need_half_of_the_cpu_time(planned: dict[str, list[Entry]], tmp_path: Path) -> None:
    found = measured(CLAIM, planned, tmp_path)
    where = {name: WHERE[name] for name in ("date", "machine", "commit")}
    assert found == {**where, "seeds": 2, "cpu_minutes": 9.0, "minutes": 4.5}


@pytest.mark.parametrize(("machine", "minutes"), [("2 cores, no GPU", 0.6), ("some GPU, 2 cores", None)])
def test_a_claim_without_runs_has_the_time_of_its_judgement(
    tmp_path: Path, machine: str, minutes: float | None
) -> None:
    assert measured(CLAIMS["qu-figure7-epsilon"], {}, tmp_path) is None
    (tmp_path / "claim.json").write_text(json.dumps({**WHERE, "machine": machine, "minutes": {"cpu": 0.6}}))
    found = measured(CLAIMS["qu-figure7-epsilon"], {}, tmp_path)
    assert (found and found["minutes"]) == minutes


def test_measurements_come_beside_earlier_ones_and_replace_none_of_more_seeds(tmp_path: Path) -> None:
    file = tmp_path / "two_cores.json"
    assert two_cores(file) == {}
    add({"b": {"seeds": 3, "minutes": 1.0}, "c": {"seeds": 1, "minutes": 2.0}}, file)
    add({"a": {"seeds": 1}, "b": {"seeds": 1, "minutes": 9.0}, "c": {"seeds": 1, "minutes": 4.0}}, file)
    found = two_cores(file)
    assert (list(found), found["b"]["minutes"], found["c"]["minutes"]) == (["a", "b", "c"], 1.0, 4.0)


def test_an_estimate_is_marked() -> None:
    assert minutes_on_two_cores(CLAIM, {}) == "~3"
    assert minutes_on_two_cores(CLAIM, {CLAIM.name: {"minutes": 0.72, "seeds": CLAIM.seeds["quick"]}}) == "0.7"
    assert minutes_on_two_cores(CLAIM, {CLAIM.name: {"minutes": 0.72, "seeds": 1}}) == "~0.7"
    assert minutes_on_two_cores(CLAIMS["why-months-size"], {}) == "-"
