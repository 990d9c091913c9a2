"""Records from runs that were kept in several folders: what is missing is said, and nothing is run."""

import json
import sys
from pathlib import Path

import pytest

from polyclinic_lab import records
from polyclinic_lab.claim import CLAIMS
from polyclinic_lab.judge import plan

CLAIM = CLAIMS["ours-one-site"]  # three arms, two seeds
WHERE = {"date": "2026-01-02", "machine": "2 cores, no GPU", "commit": "abc", "commit_given": False}


@pytest.fixture
def kept(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders: the first has all runs but that of fedprox with seed 1, which the second has."""
    folders = tmp_path / "first", tmp_path / "second"
    for label, arm in plan(CLAIM, tmp_path, "quick", None, phantom=False, runs=tmp_path / "runs").items():
        for entry in arm:
            run = folders[(label, entry.seed) == ("fedprox", 1)] / "runs" / entry.folder.name
            run.mkdir(parents=True)
            result = {"weights_sha256": f"same for seed {entry.seed}", "timing": {"seconds": 60.0}}
            (run / "result.json").write_text(json.dumps(result))
            (run / "origin.json").write_text(json.dumps(WHERE))
            (run / "measured").touch()
    return folders


def made(monkeypatch: pytest.MonkeyPatch, kept: list[Path], place: Path) -> dict | None:
    words = ["records", *map(str, kept), "--scale", "quick", "--claims", CLAIM.name]
    monkeypatch.setattr(sys, "argv", [*words, "--figures", str(place / "figures"), "--records", str(place)])
    records.main()
    file = place / f"{CLAIM.name}-quick.json"
    return json.loads(file.read_text()) if file.exists() else None


def test_a_record_is_made_of_all_folders_and_says_which_runs_are_missing(kept, tmp_path, monkeypatch) -> None:
    assert made(monkeypatch, [kept[1]], tmp_path) is None  # without a whole seed there is no record
    found = made(monkeypatch, [kept[0]], tmp_path)
    assert (found["missing"], found["ours"][0]["n"]) == (["fedprox, seed 1"], 1)
    found = made(monkeypatch, list(kept), tmp_path)
    assert (found["verdict"], found["missing"], found["ours"][0]["n"]) == ("yes", [], 2)
    assert (found["minutes"]["runs"], found["date"]) == (6.0, "2026-01-02")
    assert (tmp_path / "figures" / "ours-one-site-quick" / "claim.png").exists()


def test_arms_have_the_seeds_that_are_there(tmp_path, monkeypatch) -> None:
    """By hand: seeds 1, 2 of one arm and 1 of the other make one pair; the other value is kept."""
    claim = CLAIMS["qu-one-communication"]
    monkeypatch.setenv("POLYCLINIC_DATA", str(tmp_path))
    monkeypatch.setitem(globals(), "CLAIM", claim)
    (fedavg, last), (fedreplay, _) = plan(claim, tmp_path, "quick", 2, phantom=False, runs=tmp_path / "runs").values()
    for entry, carried in ((fedavg, 4e6), (last, 5e6), (fedreplay, 1e6)):
        entry.folder.mkdir(parents=True)
        result = {
            "metrics": {"test": {"mae": 9.0}},
            "communication": {"total_bytes": carried},
            "timing": {"seconds": 1},
        }
        (entry.folder / "result.json").write_text(json.dumps(result))
        (entry.folder / "measured").touch()
    found = made(monkeypatch, [tmp_path], tmp_path)
    values = {row["label"]: row["values"] for row in found["ours"] if row["metric"] == "MB"}
    assert values == {"fedavg": [4.0, 5.0], "fedreplay": [1.0, None]}
    assert found["missing"] == ["fedreplay, seed 1"]
    assert "1 seeds" in found["why"]


def test_the_commit_of_a_rule_is_that_of_an_earlier_record(kept, tmp_path, monkeypatch) -> None:
    earlier = {"claim": CLAIM.name, "scale": "full", "rule": CLAIM.rule.words, "rule_commit": "older"}
    (tmp_path / "earlier.json").write_text(json.dumps(earlier))
    assert made(monkeypatch, list(kept), tmp_path)["rule_commit"] == "older"
    (tmp_path / "ours-one-site-quick.json").unlink()
    (tmp_path / "earlier.json").write_text(json.dumps(earlier | {"rule": "another one"}))
    assert made(monkeypatch, list(kept), tmp_path)["rule_commit"] != "older"
