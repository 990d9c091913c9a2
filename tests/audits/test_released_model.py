"""The released model is of the best round: asked about membership where no kept release is of that round."""

from __future__ import annotations

import json
import shutil

import pytest
from json_schemas import assert_valid

from polyclinic.audits import attack_membership
from polyclinic.audits.audit import audit
from polyclinic.audits.open_run import open_run
from polyclinic.audits.parcels import best_round, parcels_to_audit, released_models

STUDY = {"audit.keep_parcels": 0, "sites.count": 2, "data.test": 0.4}


@pytest.fixture
def folder(tiny, undisturbed, tmp_path, hurry, monkeypatch):
    """A run of three rounds, of which sites kept the first and the last; the model is said to be of the second."""
    hurry(releases=2, candidates=25)
    monkeypatch.setattr(attack_membership, "PASSES", 2)
    monkeypatch.setattr("polyclinic.audits.audit._draw_plot", lambda draw, path: False)
    shutil.copytree(undisturbed(tiny("fedavg", STUDY, rounds=3)).folder, tmp_path / "run")
    return tmp_path / "run"


def say_best(folder, round: int) -> None:
    found = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**found, "selected": {**found["selected"], "round": round}}))


def test_the_model_of_a_round_in_between_is_asked_about_members(folder):
    say_best(folder, 2)
    report = audit(folder, kinds=["weights"])
    assert_valid(folder)
    assert [one["round"] for one in report["parcels"]] == [1, 3, 2]
    released = report["parcels"][-1]
    assert (released["operation"], released["site"], released["digests"]) == ("released model", "site-1", [])
    assert {one["attack"] for one in released["findings"]} == {"loss-threshold", "rmia", "lira"}
    assert {one["question"] for one in released["findings"]} == {"membership"}
    weights = report["verdicts"]["weights"]
    assert weights["questions"]["membership"]["parcels"] == 3
    assert (weights["attacked"], weights["released"]) == (2, 1)  # the model is no parcel that left
    assert report["level"] == pytest.approx(0.01 / (2 * 7 + 3))  # its tests have their part of the level


def test_a_round_that_is_attacked_anyway_is_not_asked_twice(folder):
    assembly, lines = open_run(folder)
    chosen = parcels_to_audit(folder, assembly.study, lines, "quick", ("weights",), ())
    for round, asked in ((1, 0), (2, 1), (3, 0)):
        say_best(folder, round)
        assert len(released_models(folder, assembly, chosen)) == asked


def test_a_result_that_cannot_be_read_names_no_round(folder):
    assert best_round(folder) is not None
    (folder / "result.json").write_text("{")
    assert best_round(folder) is None


def test_figures_by_class_have_intervals(folder):
    report = audit(folder, kinds=["weights"])
    evidence = next(one for one in report["parcels"][0]["findings"] if one["attack"] == "loss-threshold")["evidence"]
    classes = [name for name in evidence if name.startswith("auc_class_")]
    for name in classes:
        label = name.removeprefix("auc_class_")
        low, hits, high = (evidence[f"hits_class_{label}{end}"] for end in ("_low", "", "_high"))
        assert low <= hits <= high
    assert evidence["hits_low"] <= evidence["hits"] <= evidence["hits_high"]
