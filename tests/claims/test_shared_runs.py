"""Runs that claims share: one folder for each study, and a note of where and with which code it ran."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polyclinic.claims.catalogue import CLAIMS
from polyclinic.claims.measures import carried_each_round
from polyclinic.claims.reproduce import ORIGIN, machine, note_origin, origin, origin_of, plan
from polyclinic.runner.compare import Entry


@pytest.fixture(autouse=True)
def images_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYCLINIC_DATA", str(tmp_path))


def planned(name: str, folder: Path) -> dict[str, list[Entry]]:
    return plan(CLAIMS[name], folder / name, "quick", None, phantom=False, runs=folder / "runs")


def test_claims_with_the_same_study_share_its_run(tmp_path: Path) -> None:
    figure = planned("qu-figure5-retina-high", tmp_path)["cwt-replay"]
    replayed = planned("qu-replayed-retina", tmp_path)["cwt-replay"]
    assert [entry.folder for entry in figure] == [entry.folder for entry in replayed]
    assert len({entry.folder for entry in figure}) == len(figure)


def test_other_studies_have_other_runs(tmp_path: Path) -> None:
    high, low = (planned(f"qu-figure5-retina-{split}", tmp_path)["cwt"] for split in ("high", "low"))
    assert not {entry.folder for entry in high} & {entry.folder for entry in low}


def test_a_record_names_the_machines_and_commits_of_its_runs(tmp_path: Path) -> None:
    entries = planned("ours-one-site", tmp_path)["fedavg"]
    assert len(entries) == 2
    for entry, where in zip(entries, ("one GPU", "two cores"), strict=True):
        entry.folder.mkdir(parents=True)
        note = {"date": "2026-01-02", "machine": where, "commit": "abc", "commit_given": where == "one GPU"}
        (entry.folder / ORIGIN).write_text(json.dumps(note))
    assert origin_of(entries) == {
        "date": "2026-01-02",
        "machine": "one GPU, two cores",
        "commit": "abc",
        "commit_given": True,
    }


def test_a_run_that_ended_here_says_so(tmp_path: Path) -> None:
    note_origin(tmp_path)
    assert json.loads((tmp_path / ORIGIN).read_text()) == origin()
    assert origin_of([]) == origin()


def test_the_machine_names_the_cores_that_a_run_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyclinic.claims.reproduce.os.cpu_count", lambda: 16)
    monkeypatch.setattr("polyclinic.claims.reproduce.cores", lambda: 2)
    assert "2 of 16 cores" in machine()
    monkeypatch.setattr("polyclinic.claims.reproduce.cores", lambda: 16)
    assert " of " not in machine()


def test_an_arm_may_change_at_one_scale_only(tmp_path: Path) -> None:
    claim = CLAIMS["why-skin-longer-generator"]
    steps = {}
    for scale in ("quick", "full"):
        arms = plan(claim, tmp_path, scale, 1, phantom=True)
        steps[scale] = [arms[label][0].study.generator.steps for label in ("feder", "longer")]
        assert not arms["longer"][0].study.tuning.on
    assert steps == {"quick": [150, 450], "full": [10000, 30000]}


def test_bytes_of_a_site_and_round_are_those_that_sites_send(tmp_path: Path) -> None:
    told = {"total_bytes": 90, "sent_bytes": 48_000_000, "per_site": {"a": 1, "b": 2}}
    (tmp_path / "result.json").write_text(json.dumps({"communication": told, "rounds": 4}))
    assert carried_each_round(tmp_path) == {"MB a site and round": 6.0}
