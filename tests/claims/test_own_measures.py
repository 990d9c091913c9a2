"""What our own claims measure: a killed run, and the price of a round."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyclinic.claims.claim import Row
from polyclinic.claims.own_measures import same_after_kill
from polyclinic.errors import WorkFailed
from polyclinic.runner.run import run
from polyclinic.study import parse_study


@pytest.mark.slow  # two processes that import torch
def test_a_killed_run_is_resumed_and_compared(tmp_path: Path) -> None:
    tables = {
        "data": {"source": "hand-phantom", "size": 28, "samples": 60},
        "task": {"name": "regression"},
        "sites": {"count": 2, "partition": "iid"},
        "engine": {"workers": 1},
        "method": {"name": "fedavg", "rounds": 40},
    }
    done = run(parse_study(tables), tmp_path / "fedavg-seed0")
    assert same_after_kill({"fedavg": [done.folder]}, "quick") == [Row("fedavg", "different models", (1.0,))]
    assert (tmp_path / "fedavg-seed0-killed" / "result.json").exists()


def test_a_run_that_cannot_begin_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyclinic.claims.own_measures.sys.executable", "/bin/false")
    with pytest.raises(WorkFailed, match="no round of the run"):
        same_after_kill({"fedavg": [tmp_path / "run"]}, "quick")
