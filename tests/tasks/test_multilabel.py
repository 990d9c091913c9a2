"""Several labels of an image: by hand, and from a table to a prediction by the commands."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from polyclinic.cli import run_app
from polyclinic.data.datasets.npz import Npz
from polyclinic.data.datasets.table import Csv
from polyclinic.data.labels import sets_of
from polyclinic.errors import BadInput
from polyclinic.study import load_study
from polyclinic.tasks import MultiLabel, Target
from polyclinic.tasks.multilabel import labels_in

TARGET = Target(("cyst", "cyst|mass", "mass", "none"))
TASK = MultiLabel()
STUDY = """
format = 1
[data]
source = "csv"
path = "t.csv"
size = 28
several = "|"
[sites]
partition = "iid"
count = 2
[task]
name = "multilabel"
[model]
backbone = "small-cnn"
[optimizer]
name = "adamw"
lr = 0.005
batch_size = 16
[method]
name = "fedavg"
rounds = 4
local_epochs = 4
"""


def test_losses_and_probabilities_are_of_each_label_by_itself():
    logits = torch.tensor([[2.0, -1.0], [0.0, 3.0]])
    truth = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    by_hand = -(truth * logits.sigmoid().log() + (1 - truth) * (-logits).sigmoid().log()).mean(1)
    assert TASK.outputs(TARGET) == 2
    assert torch.allclose(TASK.losses(logits, torch.tensor([1, 3]), TARGET), by_hand)
    mixed = TASK.mixable(torch.tensor([1, 3]), TARGET)
    assert torch.allclose(TASK.losses(logits, mixed, TARGET), by_hand)
    assert torch.allclose(TASK.predictions(logits, TARGET), logits.sigmoid())
    assert labels_in(labels_in(TARGET.classes)) == ("cyst", "mass")  # what a model's card says builds the same head
    with pytest.raises(BadInput, match="no image has a label"):
        TASK.outputs(Target(("none",)))


def test_sums_of_sites_add_up_to_the_figures_of_each_label():
    logits = torch.tensor([[2.0, -1.0], [-0.5, 3.0], [1.0, 1.0], [-2.0, -3.0], [0.5, -0.2]])
    labels = torch.tensor([0, 1, 2, 3, 3])  # cyst; both; mass; none; none
    parts = [TASK.sums(logits[rows].double(), labels[rows], None, TARGET) for rows in ([0, 1], [2, 3, 4])]
    for sums in parts:
        TASK.check_sums(sums, TARGET)
    found = TASK.finish(TASK.add(*parts))
    assert found["sensitivity of cyst"] == 0.5
    assert found["specificity of cyst"] == pytest.approx(1 / 3)
    assert found["sensitivity of mass"] == found["specificity of mass"] == 1.0
    assert found["auc of cyst"] == pytest.approx(4 / 6)  # 2 above 1, .5 and -2; -.5 above -2
    assert found["auc"] == pytest.approx((4 / 6 + 1.0) / 2)
    assert found["accuracy"] == pytest.approx(7 / 10)
    assert found["loss"] == pytest.approx(float(TASK.losses(logits, labels, TARGET).mean()))
    opened = TASK.opened(TASK.summable(TASK.add(*parts), 1e9))
    TASK.check_sums(opened, TARGET)
    lie = {**parts[0], "of cyst": torch.full((2, 2), 100)}
    with pytest.raises(ValueError, match="the table of a label is of another number of images"):
        TASK.check_sums(lie, TARGET)
    assert TASK.finish({**parts[0], "count": torch.tensor(0)}) == {}


@pytest.mark.parametrize(("values", "several", "sets"), [
    (["mass|cyst", "cyst | mass", "none", "", "cyst"], "|", ["cyst|mass", "cyst|mass", "none", "none", "cyst"]),
    (["mass; cyst", "none"], ";", ["cyst|mass", "none"]),
    ([["1", "0"], ["1", "1"], ["0", "0"]], ("mass", "cyst"), ["mass", "cyst|mass", "none"]),
    ([[True, False], [1.0, 1.0]], ("mass", "cyst"), ["mass", "cyst|mass"]),
])  # fmt: skip
def test_labels_of_an_image_are_a_set(values, several, sets):
    assert sets_of(np.array(values), several, str).tolist() == sets


def test_what_is_no_set_of_labels_is_refused():
    with pytest.raises(BadInput, match="row 1: 'cyst' must be 0 or 1"):
        sets_of(np.array([[1, 0], [1, 2]]), ("mass", "cyst"), "row {}".format)
    with pytest.raises(BadInput, match="no image has a label"):
        sets_of(np.array(["none"]), "|", str)
    with pytest.raises(BadInput, match="no image has the label 'cyst'"):
        sets_of(np.array([[1, 0], [0, 0]]), ("mass", "cyst"), str)
    for more, words in (({"rename": {"mass": "tumour"}}, "would name sets"), ({"several": ("a", "a")}, "column twice")):
        with pytest.raises(ValueError, match=words):
            Csv(**{"path": "t.csv", "several": "|", **more})
    with pytest.raises(BadInput, match=r"the label 'a\|b' contains '\|'"):
        sets_of(np.array(["a|b;c"]), ";", str)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """120 images: a bright left half is a cyst, a bright right half a mass."""
    top, rng, rows = tmp_path_factory.mktemp("several"), np.random.default_rng(0), []
    for number in range(120):
        cyst, mass = rng.integers(0, 2, 2)
        pixels = rng.integers(0, 60, (28, 28))
        pixels[8:20, 3:11] += 150 * cyst
        pixels[8:20, 17:25] += 150 * mass
        Image.fromarray(pixels.astype(np.uint8)).save(top / f"{number}.png")
        labels = "|".join(["mass"] * mass + ["cyst"] * cyst) or "none"
        rows.append((f"{number}.png", labels, mass, cyst, pixels))
    with (top / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label", "mass", "cyst"), *(row[:4] for row in rows)])
    np.savez(top / "a.npz", images=np.array([row[4] for row in rows], np.uint8), labels=[row[2:4] for row in rows])
    (top / "study.toml").write_text(STUDY)
    return top


def test_cells_columns_and_arrays_say_the_same(folder):
    ways = [
        Csv(path=folder / "t.csv", several="|"),
        Csv(path=folder / "t.csv", several=("mass", "cyst")),
        Npz(path=folder / "a.npz", several=("mass", "cyst")),
    ]
    found = [way.load() for way in ways]
    assert {one.classes for one in found} == {("cyst", "cyst|mass", "mass", "none")}
    assert all((one.labels == found[0].labels).all() for one in found)
    with pytest.raises(BadInput, match="names 3 columns, and 'labels' has others"):
        Npz(path=folder / "a.npz", several=("a", "b", "c")).load()


def test_from_a_table_to_a_prediction(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert run_app(["study", "check", "study.toml"]) == 0, capsys.readouterr().err
    assert run_app(["run", "study.toml", "--out", "run", "--quiet"]) == 0
    metrics = json.loads((folder / "run" / "result.json").read_text())["metrics"]
    assert {"auc of cyst", "auc of mass", "sensitivity of mass", "specificity of cyst"} <= metrics["test"].keys()
    assert metrics["test"]["auc"] > 0.9
    assert run_app(["report", "run"]) == 0
    assert "auc of mass" in (folder / "run" / "report.html").read_text(encoding="utf-8").lower()
    assert run_app(["export", "run", "--to", "torchscript", "--out", "model.ts"]) == 0
    capsys.readouterr()
    assert run_app(["predict", "run", "0.png", "1.png", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert {"labels", "p(cyst)", "p(mass)"} <= rows[0].keys()
    assert load_file(folder / "run" / "model.safetensors")
    assert run_app(["audit", "run"]) == 2
    assert "several labels an image are not audited" in capsys.readouterr().err


@pytest.mark.parametrize(("changes", "words"), [
    (["method.name=analytic", "model.backbone=efficientnet-lite0-1024"], "learns one class an image"),
    (["method.name=fedreplay", "model.cut=conv2"], "learns one class an image"),
    (["task.name=classification"], "set task.name = 'multilabel'"),
    (["evaluation.statistics=true"], "is for one class an image"),
    (["policy.scores=coarse"], "is for one class an image"),
])  # fmt: skip
def test_what_cannot_learn_several_labels_is_refused(folder, changes, words):
    with pytest.raises(BadInput, match=words):
        load_study(folder / "study.toml", changes)
