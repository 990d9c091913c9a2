"""Tables of outputs: what betrays a hospital is found, noise is not, and rounding is said to help where it does."""

import csv
import json

import numpy as np
import pytest
import typer.testing

from polyclinic.audits.predictions import audit_predictions
from polyclinic.cli.app import app
from polyclinic.cli.predict import coarser
from polyclinic.errors import BadInput


def written(folder, rng, shift, count=400, patients=None):
    """Probabilities of images of two hospitals; those of the second are higher by `shift`."""
    file, own = folder / "table.csv", rng.standard_normal(patients or count)
    with file.open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(["file", "p(sick)", "site", "patient"])
        for number in range(count):
            patient = number if patients is None else number % patients
            share = 0.5 + 0.02 * own[patient] + 0.001 * rng.standard_normal() + shift * (patient % 2)
            rows.writerow([f"{number}.png", f"{share:.6f}", "xy"[patient % 2], f"p{patient}"])
    return file


def test_outputs_that_betray_the_hospital_until_they_are_rounded(tmp_path):
    file = written(tmp_path, np.random.default_rng(0), 0.03)
    found = audit_predictions(file, "site", "patient")
    assert found["verdict"] == "leaks"
    assert 0.7 < found["accuracy"] < 0.85
    assert found["coarse"]["step"] >= 0.1
    shown = typer.testing.CliRunner().invoke(app, ["audit", "predictions", str(file), "--json"])
    assert json.loads(shown.output)["verdict"] == "leaks"
    assert coarser({"class": "sick", "p(sick)": 0.537}, 0.25) == {"class": "sick", "p(sick)": 0.5}


def test_outputs_without_a_hospital_in_them_raise_no_alarm(tmp_path):
    words = [
        audit_predictions(written(tmp_path, np.random.default_rng(seed), 0.0), "site")["verdict"] for seed in range(8)
    ]
    assert words.count("leaks") <= 1
    assert words.count("withstood") >= 7


def test_a_column_with_gaps_is_refused_and_words_are_said_to_be_left_out(tmp_path):
    file = written(tmp_path, np.random.default_rng(0), 0.0)
    said = audit_predictions(file, "site")["words"]
    assert "not looked at: file, patient" in said
    assert "Every row counts as a patient" in said
    (tmp_path / "gaps.csv").write_text(
        file.read_text().replace("0.png,0.", "0.png,", 1).replace("1.png,0.", "1.png,x", 1)
    )
    for name, words in (("gaps.csv", "row 3 has no number"), ("nowhere.csv", "no such file")):
        with pytest.raises(BadInput, match=words):
            audit_predictions(tmp_path / name, "site")


def test_a_patients_images_are_no_evidence_of_a_hospital(tmp_path):
    """Ten images each of 24 patients whose outputs differ, and not their hospitals'."""
    file = written(tmp_path, np.random.default_rng(0), 0.0, count=240, patients=24)
    found = audit_predictions(file, "site", "patient")
    assert found["verdict"] == "not tested"  # so few patients could hide a lot
    for column, patient, words in (("nowhere", None, "nowhere"), ("file", "patient", "several values")):
        with pytest.raises(BadInput, match=words):
            audit_predictions(file, column, patient)
    assert (
        audit_predictions(written(tmp_path, np.random.default_rng(0), 0.0, count=16), "site")["verdict"] == "not tested"
    )
