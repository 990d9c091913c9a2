"""Planted leaks, from a study over gate, ledger and kept parcels to the audit's verdict."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from polyclinic.audits.audit import audit
from polyclinic.generators import GENERATORS
from polyclinic.runner.run.run import run


@pytest.fixture(scope="module")
def leaks() -> ModuleType:
    """The generators that leak on purpose, which a benchmark has."""
    path = Path(__file__).parents[2] / "lab" / "benchmarks" / "planted.py"
    spec = importlib.util.spec_from_file_location("planted", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["planted"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def report_on(leaks, tmp_path, monkeypatch, hurry):
    monkeypatch.setitem(GENERATORS, "planted", leaks.Planted)
    monkeypatch.delenv("POLYCLINIC_DATA", raising=False)

    def audited(leak: str, candidates: int = 150) -> dict:
        hurry(candidates=candidates)  # 150: as many as the quick budget has; a projection of next to nothing
        study = leaks.study_of(tmp_path / "data", leaks.planted(leak, tmp_path / "data"), 28)
        run(study, tmp_path / "run")
        return audit(tmp_path / "run", kinds=["generator"])

    return audited


def evidence(report: dict, attack: str) -> dict:
    return report["verdicts"]["generator"]["evidence"][attack]


@pytest.mark.slow
def test_a_generator_overfitted_on_fifty_images_fails(report_on):
    report = report_on("overfitted")
    assert report["verdicts"]["generator"]["verdict"] == "leaks"
    assert evidence(report, "copies")["copies"] > 100
    assert evidence(report, "nearest-synthetic")["auc"] > 0.9


def test_a_generator_that_mirrors_training_images_fails(report_on):
    report = report_on("mirrored", 60)  # all of its 50 training images
    assert report["verdicts"]["generator"]["verdict"] == "leaks"
    assert evidence(report, "copies")["copies"] == evidence(report, "copies")["made"]
    assert "mirrored is training image" in report["verdicts"]["generator"]["words"]


@pytest.mark.slow
def test_images_of_other_patients_pass(report_on):
    report = report_on("honest")
    assert report["verdicts"]["generator"]["verdict"] != "leaks"
    assert evidence(report, "copies")["copies"] == 0
    assert abs(evidence(report, "nearest-synthetic")["auc"] - 0.5) < 0.15
    checks = {check["attack"]: check for check in report["verdicts"]["generator"]["power"]}
    assert checks["nearest-synthetic"]["leak"] == "leaning images"
    assert checks["nearest-synthetic"]["evidence"]["auc"] >= 0.7
