"""Studies of volumes, from data to report: methods, a secure sum, a killed run, and what is kept of each case."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from polyclinic.cli import app
from polyclinic.runner.evaluate.case_scores import read_cases

VOLUMES = {
    "data": {"source": "brain-volumes", "samples": 12, "shape": [24, 24, 16], "size": [16, 16, 16], "test": 0.3},
    "sites": {"partition": "iid", "count": 2},
    "task": {"name": "volume-segmentation", "patches": 2, "tolerance": 10.0},
    "model": {"backbone": "dynunet", "norm": "instance", "arguments": {"filters": [4, 8, 8]}},
    "optimizer": {"name": "adam", "lr": 0.01, "batch_size": 2, "augment": ["flip"]},
}


@pytest.fixture(scope="module")
def fedavg(tiny, undisturbed):
    return undisturbed(tiny("fedavg", VOLUMES, rounds=2, local_epochs=2))


def test_a_run_scores_structures_in_millimetres_by_case_and_site(fedavg):
    scores = fedavg.metrics["test"]
    assert {"dice", "dice_whole", "dice_core", "dice_enhancing", "hd95_whole", "surface_dice_core"} <= scores.keys()
    cases = read_cases(fedavg.folder)
    assert cases.structures.tolist() == ["whole", "core", "enhancing"]
    assert cases.scores[:, :, 0].mean() == pytest.approx(scores["dice"])
    assert cases.scores[:, 0, 1].mean() == pytest.approx(scores["hd95_whole"])
    assert cases.masks.shape[1:] == (160, 480)
    assert set(fedavg.metrics["per_site"]) == {"site-1", "site-2"}


@pytest.mark.parametrize(
    ("method", "settings"),
    [("centralized", {}), ("fedavg", {"federation": {"sum": "secure"}, "sites.count": 3})],
    ids=["centralized", "secure sum"],
)
def test_methods_train_volumes(method, settings, tiny, undisturbed):
    found = undisturbed(tiny(method, {**VOLUMES, **settings}, rounds=1))
    assert 0 <= found.metrics["test"]["dice"] <= 1


def test_the_report_shows_planes_with_both_outlines(fedavg):
    done = CliRunner().invoke(app, ["report", str(fedavg.folder)])
    assert done.exit_code == 0, done.output
    text = (fedavg.folder / "report.html").read_text(encoding="utf-8")
    assert "Worst, middle and best cases" in text
    assert "Of a volume there are three planes" in text


def test_the_model_file_knows_channels_structures_and_preparation(fedavg):
    content = (fedavg.folder / "model.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int(np.frombuffer(content[:8], np.int64)[0])])
    volume = json.loads(header["__metadata__"]["polyclinic"])["volume"]
    assert volume["channels"] == ["flair", "t1", "t1ce", "t2"]
    assert volume["structures"]["core"] == [2, 3]
    assert volume["preparation"]["normalise"] == "each case"
