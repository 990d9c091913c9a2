"""A folder of runs, written by hand so that it costs nothing, and the server in front of it."""

import json
from pathlib import Path

import pytest
from served import Served, write_run

from polyclinic.report.serve.jobs import Jobs
from polyclinic.report.serve.server import Access


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two runs, a comparison of one, a study; and beside the folder what nobody may see."""
    place = tmp_path / "project"
    write_run(place / "runs" / "first")
    write_run(place / "runs" / "second", method="cwt", finished=False)
    write_run(place / "runs" / "both" / "fedavg-seed0")
    summary = {"test_accuracy": {"mean": 0.8, "std": 0.1, "n": 1}, "total_bytes": {"mean": 10.0, "std": 0.0, "n": 1}}
    (place / "runs" / "both" / "comparison.json").write_text(json.dumps({"methods": {"fedavg": summary}}))
    (place / "study.toml").write_text('[method]\nname = "fedavg"\n')
    (tmp_path / "secret.csv").write_text("patient,diagnosis\n")
    return place


@pytest.fixture
def served(folder: Path) -> Served:
    return Served(folder, Access(8642), Jobs(folder))
