"""`polyclinic reproduce`: a real claim with tiny studies, run, judged, drawn and taken up again."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polyclinic.claims.catalogue import CLAIMS
from polyclinic.claims.cpu_time import CPU, ORIGIN, RUN
from polyclinic.claims.measures import kept
from polyclinic.claims.reproduce import commit, copy_picture, plan, reproduce, rule_commit
from polyclinic.cli.app import app
from polyclinic.errors import BadInput

TINY = dataclasses.replace(
    CLAIMS["ours-one-site"],
    arms={name: CLAIMS["ours-one-site"].arms[name] for name in ("fedavg", "fedavgm")},
    scales={"quick": ("data.samples=60", "method.rounds=1")},
    seeds={"quick": 1, "full": 1},
)


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    out = tmp_path_factory.mktemp("claim")
    patch = pytest.MonkeyPatch()
    patch.setattr("polyclinic.claims.ours.CLAIMS", (TINY,))
    yield reproduce(TINY, out), out
    patch.undo()


@pytest.mark.slow
def test_a_claim_is_run_and_judged(checked: tuple[dict, Path]) -> None:
    found, out = checked
    assert found["holds"] == "yes"
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
    assert again["holds"] == "yes"
    assert (out / "fedavg-seed0" / "result.json").stat().st_mtime_ns == before


@pytest.mark.slow
def test_a_folder_of_another_scale_is_refused(checked: tuple[dict, Path]) -> None:
    _, out = checked
    with pytest.raises(BadInput, match="another scale"):
        reproduce(TINY, out, scale="full")


def test_an_exported_tree_is_told_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = CLAIMS["ours-one-site"]
    assert commit()["commit_given"] is False
    monkeypatch.setattr("polyclinic.claims.reproduce.git", lambda *words: "")
    assert (commit(), rule_commit(claim)) == ({"commit": "", "commit_given": False}, "")
    monkeypatch.setenv("POLYCLINIC_COMMIT", "abc123")
    assert commit() == {"commit": "abc123", "commit_given": True}
    assert rule_commit(claim) == "abc123"


def test_another_repository_around_an_exported_tree_does_not_give_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyclinic.claims.reproduce.git", lambda *words: "" if words[0] == "ls-files" else "theirs")
    monkeypatch.setenv("POLYCLINIC_COMMIT", "abc123")
    assert commit() == {"commit": "abc123", "commit_given": True}


def test_what_was_computed_of_a_run_is_kept(tmp_path: Path) -> None:
    asked = []
    for _ in range(2):
        assert kept(tmp_path, "worth.json", lambda run: {"worth": asked.append(run) or 7}) == {"worth": 7}
    assert asked == [tmp_path]


def test_a_picture_of_the_first_run_lies_beside_the_figure(tmp_path: Path) -> None:
    claim = CLAIMS["qu-replayed-bone-age"]
    (entry,) = (arm[0] for arm in plan(claim, tmp_path, "quick", 1, phantom=True).values())
    drawn = entry.folder / "sites" / "site-1" / "replay.png"
    drawn.parent.mkdir(parents=True)
    drawn.write_bytes(b"picture")
    copy_picture(claim, [entry], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes() == b"picture"


def test_the_list_has_a_line_for_each_claim() -> None:
    told = CliRunner().invoke(app, ["reproduce", "--list", "--json"])
    assert [one["claim"] for one in json.loads(told.stdout)] == list(CLAIMS)


def test_the_list_has_minutes_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"ours-one-site": {"minutes": 3.21, "seeds": CLAIMS["ours-one-site"].seeds["quick"]}}
    monkeypatch.setattr("polyclinic.claims.two_cores.two_cores", lambda: found)
    listed = CliRunner().invoke(app, ["reproduce", "--list"], env={"COLUMNS": "120"}).stdout
    (line,) = [line.split() for line in listed.splitlines() if "ours-one-site" in line]
    assert "3.2" in line
    (guessed,) = [line.split() for line in listed.splitlines() if "ours-engines-agree" in line]
    assert "~3" in guessed
    told = json.loads(CliRunner().invoke(app, ["reproduce", "--list", "--json"]).stdout)
    by_claim = {one["claim"]: one["two_cores"] for one in told}
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
