"""Utility along training, as FELICIA's figures have it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polyclinic.claims.catalogue import CLAIMS
from polyclinic.claims.felicia import curve
from polyclinic.claims.reproduce import plan


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    entry = plan(CLAIMS["felicia-figure9-longer"], tmp_path, "quick", 1, phantom=True)["FELICIA"][0]
    entry.folder.mkdir(parents=True)
    worth = [{"round": n, "sites": {"hospital-1": {"test_synthetic": 0.5 + n / 10}}} for n in (1, 2, 3)]
    told = {"metrics": {"diets": {"hospital-1": {}}}, "worth": worth}
    (entry.folder / "result.json").write_text(json.dumps(told))
    return entry.folder


def test_a_curve_has_a_point_for_each_weighing(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = plan(CLAIMS["felicia-figure9-longer"], finished, "quick", 1, phantom=True)["FELICIA"][0].study
    monkeypatch.setattr("polyclinic.claims.felicia.load_run_study", lambda run: study)
    found = curve("synthetic")(finished)
    assert found == {
        "first auc at own site, synthetic": 0.6,
        "rise of auc at own site, synthetic": pytest.approx(0.2),
        "auc at own site, synthetic after 100 steps": 0.6,
        "auc at own site, synthetic after 200 steps": 0.7,
        "auc at own site, synthetic after 300 steps": 0.8,
    }
    assert curve("augmented")(finished) == {}
