"""`polyclinic reproduce`: a real claim with tiny studies, run, judged, drawn and taken up again."""

import argparse
import dataclasses
import json
import re
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from polyclinic.cli.app import app
from polyclinic.errors import BadInput
from polyclinic.runner.compare.compare import Entry
from polyclinic_lab import campaign
from polyclinic_lab.claim import CLAIMS
from polyclinic_lab.judge import copy_picture, plan, reproduce
from polyclinic_lab.origin import CPU, ORIGIN, RUN, commit, last_commit, origin_of

TINY = dataclasses.replace(
    CLAIMS["ours-one-site"],
    arms={name: CLAIMS["ours-one-site"].arms[name] for name in ("fedavg", "fedavgm")},
    scales={"quick": ("data.samples=60", "method.rounds=1")},
    seeds={"quick": 1, "full": 1},
)


@pytest.fixture(autouse=True)
def images_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYCLINIC_DATA", str(tmp_path))


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    out = tmp_path_factory.mktemp("claim")
    return reproduce(TINY, out), out


@pytest.mark.slow
def test_a_claim_is_run_and_judged(checked: tuple[dict, Path]) -> None:
    found, out = checked
    assert found["verdict"] == "yes"
    assert found["ours"] == [
        {"label": "all arms", "metric": "different models", "mean": 1.0, "std": 0.0, "n": 1, "values": [1.0]}
    ]
    assert json.loads((out / "claim.json").read_text()) == found
    assert (out / "claim.png").stat().st_size > 1000
    notes = [json.loads((out / f"{name}-seed0" / ORIGIN).read_text()) for name in TINY.arms]
    assert all(one[CPU][RUN] > 0.5 for one in notes)  # to import PyTorch takes longer


@pytest.mark.slow
def test_finished_runs_are_not_run_again(checked: tuple[dict, Path]) -> None:
    _, out = checked
    before = (out / "fedavg-seed0" / "result.json").stat().st_mtime_ns
    again = reproduce(TINY, out)
    assert again["verdict"] == "yes"
    assert (out / "fedavg-seed0" / "result.json").stat().st_mtime_ns == before


@pytest.mark.slow
def test_a_folder_of_another_scale_is_refused(checked: tuple[dict, Path]) -> None:
    _, out = checked
    with pytest.raises(BadInput, match="another scale"):
        reproduce(TINY, out, scale="full")


def test_an_exported_tree_is_told_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = CLAIMS["ours-one-site"]
    assert commit()["commit_given"] is False
    monkeypatch.setattr("polyclinic_lab.origin.git", lambda *words: "")
    assert (commit(), last_commit(claim.file)) == ({"commit": "", "commit_given": False}, "")
    monkeypatch.setenv("POLYCLINIC_COMMIT", "abc123")
    assert commit() == {"commit": "abc123", "commit_given": True}
    assert last_commit(claim.file) == "abc123"


def test_pictures_of_the_first_run_of_each_arm_lie_beside_the_figure(tmp_path: Path) -> None:
    claim = CLAIMS["felicia-figure5-border"]
    planned = plan(claim, tmp_path, "quick", 1, phantom=False)
    for width, arm in zip((2, 3), planned.values(), strict=True):
        arm[0].folder.mkdir(parents=True)
        Image.new("RGB", (width, 5)).save(arm[0].folder / "scatter.png")
    copy_picture(claim, planned, tmp_path / "picture.png")
    assert Image.open(tmp_path / "picture.png").size == (3, 10)


def test_the_list_has_minutes_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"ours-one-site": {"minutes": 3.21, "seeds": CLAIMS["ours-one-site"].seeds["quick"]}}
    monkeypatch.setattr("polyclinic_lab.two_cores.two_cores", lambda: found)
    listed = CliRunner().invoke(app, ["reproduce", "--list"], env={"COLUMNS": "120"}).stdout
    (line,) = [line.split() for line in listed.splitlines() if "ours-one-site" in line]
    assert "3.2" in line
    (guessed,) = [line.split() for line in listed.splitlines() if "ours-engines-agree" in line]
    assert "~3" in guessed
    told = json.loads(CliRunner().invoke(app, ["reproduce", "--list", "--json"]).stdout)
    by_claim = {one["claim"]: one["two_cores"] for one in told}
    assert list(by_claim) == list(CLAIMS)
    assert (by_claim["ours-one-site"], by_claim["ours-engines-agree"]) == (found["ours-one-site"], None)


def test_the_list_fits_into_eighty_columns() -> None:
    told = CliRunner().invoke(app, ["reproduce", "--list"], env={"COLUMNS": "80"}).stdout
    assert max(map(len, told.splitlines()[:-1])) <= 80
    assert "…" not in told
    assert re.findall(r"\d{4}-\d\d-.*", told)  # no date goes on in the next line
    assert not re.search(r"\d{4}-\d\d-\d?(\s|$)", told)
    assert all(name in told for name in CLAIMS)


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        ([], "--list"),
        (["qu-table1-forgetting", "--scale", "huge"], "quick or full"),
        (["no-such-claim", "--out", "x"], "--list"),
        (["qu-table1-forgetting"], "--out"),
        (["ours-one-site", "--phantom", "--out", "x"], "leave the flag out"),
    ],
)
def test_bad_input_gets_one_sentence(words: list[str], cure: str) -> None:
    told = CliRunner().invoke(app, ["reproduce", *words])
    assert told.exit_code != 0
    assert isinstance(told.exception, BadInput | SystemExit)
    assert cure in (told.stderr + str(told.exception))


def planned(name: str, folder: Path) -> dict[str, list[Entry]]:
    return plan(CLAIMS[name], folder / name, "quick", None, phantom=False, runs=folder / "runs")


def test_claims_share_the_run_of_the_same_study_and_no_other(tmp_path: Path) -> None:
    figure = planned("qu-figure5-bone-age-high", tmp_path)["cwt-replay"]
    replayed = planned("qu-replayed-bone-age", tmp_path)["cwt-replay"]
    assert [entry.folder for entry in figure] == [entry.folder for entry in replayed]
    assert len({entry.folder for entry in figure}) == len(figure)
    high, low = (planned(f"qu-figure5-retina-{split}", tmp_path)["cwt"] for split in ("high", "low"))
    assert not {entry.folder for entry in high} & {entry.folder for entry in low}


def test_one_of_the_runs_that_share_generators_trains_them_for_the_others(tmp_path: Path) -> None:
    options = argparse.Namespace(out=tmp_path, scale="full", runs_only=True)
    tables = [CLAIMS["feder-table3-convergence"], CLAIMS["feder-table6-variants"], CLAIMS["feder-table2-centralized"]]
    jobs = campaign.plan_jobs([(claim, 2) for claim in tables], options)
    assert len(jobs) == 2 * 9  # nine arms
    tasks = [job for job in jobs if isinstance(job, campaign.Task) and campaign.generators_of(job.entry.study)]
    trainers = [task for task in tasks if task.ready]
    assert [(task.entry.method, task.entry.seed) for task in trainers] == [("feder", 0), ("feder", 1)]
    trainers[0].over = True
    assert sum(task.ready for task in tasks) == 6  # both versions, and two poolings, of the first seed


def test_a_record_names_the_machines_and_commits_of_its_runs(tmp_path: Path) -> None:
    entries = planned("ours-one-site", tmp_path)["fedavg"]
    assert len(entries) == 2
    for entry, where in zip(entries, ("one GPU", "two cores"), strict=True):
        entry.folder.mkdir(parents=True)
        note = {"date": "2026-01-02", "machine": where, "commit": "abc", "commit_given": where == "one GPU"}
        (entry.folder / ORIGIN).write_text(json.dumps(note))
    found = {"date": "2026-01-02", "machine": "one GPU, two cores", "commit": "abc", "commit_given": True}
    assert origin_of([entry.folder for entry in entries]) == found
