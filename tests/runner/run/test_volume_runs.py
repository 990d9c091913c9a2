"""Studies of volumes, from data to report: methods, a secure sum, a killed run, and what is kept of each case."""

import copy
import json

import nibabel
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from polyclinic.cli import app
from polyclinic.data.datasets.phantoms.brain_volumes import BrainVolumes
from polyclinic.data.volumes.preparation import Preparation
from polyclinic.data.volumes.volume import RawVolume
from polyclinic.errors import BadInput
from polyclinic.runner.evaluate.case_scores import read_cases
from polyclinic.runner.export.export import export
from polyclinic.runner.predict.volumes import values_of

VOLUMES = {
    "data": {"source": "brain-volumes", "samples": 12, "shape": [24, 24, 16], "size": [16, 16, 16], "test": 0.3},
    "sites": {"partition": "iid", "count": 2},
    "task": {"name": "volume-segmentation", "patches": 2, "tolerance": 10.0},
    "model": {"backbone": "dynunet", "norm": "instance", "arguments": {"filters": [4, 8, 8]}},
    "optimizer": {"name": "adam", "lr": 0.01, "batch_size": 2, "augment": ["flip"]},
}


def volumes(**settings):
    return {**copy.deepcopy(VOLUMES), **settings}


@pytest.fixture(scope="module")
def fedavg(tiny, undisturbed):
    return undisturbed(tiny("fedavg", volumes(), rounds=2, local_epochs=2))


def test_a_run_scores_structures_and_its_model_and_report_know_them(fedavg):
    scores = fedavg.metrics["test"]
    assert {"dice", "dice_whole", "dice_core", "dice_enhancing", "hd95_whole", "surface_dice_core"} <= scores.keys()
    cases = read_cases(fedavg.folder)
    assert cases.structures.tolist() == ["whole", "core", "enhancing"]
    assert cases.scores[:, :, 0].mean() == pytest.approx(scores["dice"])
    assert cases.scores[:, 0, 1].mean() == pytest.approx(scores["hd95_whole"])
    assert cases.masks.shape[1:] == (160, 480)
    true, predicted = cases.millilitres.transpose(2, 1, 0)  # whole, core, enhancing: nested; a label is the whole
    np.testing.assert_allclose(true[0], cases.labels, rtol=0.1)
    assert (true[0] >= true[1]).all()
    assert predicted.shape == true.shape
    assert set(fedavg.metrics["per_site"]) == {"site-1", "site-2"}
    done = CliRunner().invoke(app, ["report", str(fedavg.folder)])
    assert done.exit_code == 0, done.output
    text = (fedavg.folder / "report.html").read_text(encoding="utf-8")
    assert "Worst, middle and best cases" in text
    for chart in ("Dice", "HD95 (mm)", "predicted - true volume (ml)"):
        assert f"{chart} by structure and site" in text
    assert "pixels" not in text
    assert "Of a volume there are three planes" in text
    content = (fedavg.folder / "model.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int(np.frombuffer(content[:8], np.int64)[0])])
    volume = json.loads(header["__metadata__"]["polyclinic"])["volume"]
    assert volume["channels"] == ["flair", "t1", "t1ce", "t2"]
    assert volume["structures"]["core"] == [2, 3]
    assert volume["preparation"]["normalise"] == "each case"


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("centralized", {}),
        ("fedavg", {"federation": {"sum": "secure"}, "sites.count": 3}),
        ("scaffold", {}),
        ("finetune", {}),
        ("fedrep", {}),
        ("splitnn", {}),
        ("fedreplay", {}),
        ("fedavg", {"model.arguments": {"filters": [4, 8, 8, 8], "deep_supervision": 1}, "data.size": [32, 16, 16]}),
        (
            "fedavg",
            {
                "model.backbone": "segresnet",
                "model.arguments": {"init_filters": 8, "blocks_down": [1, 1], "blocks_up": [1]},
            },
        ),
    ],
    ids=["centralized", "secure", "scaffold", "finetune", "fedrep", "splitnn", "fedreplay", "deep", "segresnet"],
)
def test_methods_train_volumes(method, settings, tiny, undisturbed):
    found = undisturbed(tiny(method, volumes(**settings), rounds=1))
    assert 0 <= found.metrics["test"]["dice"] <= 1


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        ("fedavg-share", {}, "is for images, not for volumes; choose fedavg"),
        ("fedbn", {}, "has none; choose a backbone with batch norm"),
        ("feder", {}, "there is none of volumes; choose fedavg"),
        ("fedavg-replay", {}, "is for images, not for volumes; take the table out"),
        ("felicia", {}, "'felicia' is for classification"),
        ("fedavg", {"privacy": {"epsilon": 8}}, "is for images, not for volumes; take the table out|privacy"),
        ("fedavg", {"model": {"backbone": "resnet18"}}, "is not for volumes"),
        ("fedavg", {"task": {"name": "segmentation"}}, "take volume-segmentation"),
    ],
)
def test_what_volumes_cannot_do_is_refused_with_the_cure(method, settings, words, tiny):
    with pytest.raises(BadInput, match=words):
        tiny(method, volumes(**settings), rounds=1)


@pytest.mark.slow
def test_two_processes_and_one_give_the_same_weights(fedavg, tiny, undisturbed):
    again = undisturbed(tiny("fedavg", volumes(**{"engine.workers": 2}), rounds=2, local_epochs=2))
    known = [json.loads((one.folder / "result.json").read_text()) for one in (fedavg, again)]
    assert known[0]["failures"] == known[1]["failures"] == []
    assert known[0]["weights_sha256"] == known[1]["weights_sha256"]


def save_case(folder, name, raw, channels):
    for channel, voxels in zip(channels, raw.image, strict=False):
        folder.mkdir(parents=True, exist_ok=True)
        image = nibabel.Nifti1Image(voxels.astype(np.float32), raw.affine)
        nibabel.save(image, folder / f"{name}_{channel}.nii.gz")


def test_predict_writes_masks_in_the_grid_of_each_case(fedavg, tmp_path):
    source = BrainVolumes(samples=4, shape=(24, 24, 16))
    raw = source.read(0, source.cases()[0])
    turned = RawVolume(raw.image[:, ::-1].copy(), None, raw.affine @ np.diag([-1.0, 1, 1, 1]))
    for name, one in (("a", raw), ("b", turned)):
        save_case(tmp_path / "in", name, one, source.channels)
    save_case(tmp_path / "in", "c", raw, source.channels[:3])
    command = ["predict", str(fedavg.folder), str(tmp_path / "in"), "--masks", str(tmp_path / "out")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "case c: has no channel 't2'" in done.output
    assert "whole (ml)" in done.output
    masks = {name: nibabel.load(tmp_path / "out" / f"{name}.nii.gz") for name in "ab"}
    assert masks["a"].shape == raw.image.shape[1:]
    assert set(np.unique(np.asarray(masks["a"].dataobj))) <= {0, 1, 2, 3}
    np.testing.assert_allclose(masks["b"].affine, turned.affine)
    flipped = np.asarray(masks["b"].dataobj)[::-1]
    assert (flipped == np.asarray(masks["a"].dataobj)).mean() > 0.99  # a turned file is the same head
    refused = CliRunner().invoke(app, [*command, "--slices", "all"])
    assert "--slices: this model takes whole volumes" in str(refused.exception)


@pytest.mark.parametrize("spacing", [None, (7.0, 9.0, 11.0)])
def test_maps_come_back_to_the_grid_of_the_case(spacing):
    """A box that the network marks in the prepared case is the same box, in millimetres, in the case's own voxels."""
    image = np.zeros((1, 30, 24, 20), np.float32)
    image[:, 5:25, 4:20, 3:18] = 1 + np.random.default_rng(0).random((20, 16, 15))
    box = np.zeros((30, 24, 20), np.uint8)
    box[10:20, 8:16, 6:14] = 1
    affine = np.diag([-4.0, 5.0, 6.0, 1.0])
    prepared, back = Preparation(spacing=spacing).prepared_and_back(RawVolume(image, box, affine))
    found = back(torch.from_numpy(prepared.mask[None].astype(np.float32))).numpy()[0] > 0.5
    assert found.shape == box.shape
    overlap = 2 * (found & (box > 0)).sum() / (found.sum() + box.sum())
    assert overlap == pytest.approx(1) if spacing is None else overlap > 0.75


def test_structures_become_one_mask():
    inside = np.array([[[[1, 1, 1, 0]]], [[[0, 1, 1, 0]]], [[[0, 0, 1, 1]]]], bool)
    regions = {"whole": (1, 2, 3), "core": (2, 3), "enhancing": (3,)}
    assert values_of(inside, regions).ravel().tolist() == [1, 2, 3, 0]
    classes = {"liver": (1,), "tumour": (5, 2)}
    assert values_of(inside[[0, 2]] & ~inside[[2, 1]], classes).ravel().tolist() == [1, 1, 0, 2]


@pytest.mark.parametrize("form", ["onnx", "torchscript", "monai-bundle"])
def test_export_refuses_in_one_sentence_and_writes_nothing(fedavg, form):
    with pytest.raises(BadInput, match=f"--to {form}: models of volumes are not exported yet"):
        export(fedavg.folder, form)
    assert not (fedavg.folder / "exported").exists()
