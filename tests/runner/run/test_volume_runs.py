"""Studies of volumes, from data to report: methods, a secure sum, a killed run, and what is kept of each case."""

import copy
import json
import re

import nibabel
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from polyclinic.cli import app
from polyclinic.data.datasets.phantoms.brain_volumes import BrainVolumes
from polyclinic.data.volumes.preparation import Preparation
from polyclinic.data.volumes.reading import CaseFiles, read_case
from polyclinic.data.volumes.volume import RawVolume
from polyclinic.errors import BadInput
from polyclinic.methods import METHODS
from polyclinic.runner.evaluate.case_scores import read_cases
from polyclinic.runner.export.export import export
from polyclinic.runner.export.volumes import steps_of
from polyclinic.runner.predict.model_file import VolumeCard
from polyclinic.runner.predict.volumes import values_of
from polyclinic.study import parse_study

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
        ("fedopt", {}),
        ("feddyn", {}),
        ("ditto", {}),
        ("cwt", {}),
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
    ids=[
        "centralized",
        "secure",
        "scaffold",
        "fedopt",
        "feddyn",
        "ditto",
        "cwt",
        "finetune",
        "fedrep",
        "splitnn",
        "fedreplay",
        "deep",
        "segresnet",
    ],
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
        ("fedavg", {"replay": {}}, "replay: is for images, not for volumes; take the table out"),
        ("felicia", {}, "there is none of volumes; choose fedavg"),
        ("cwt-replay", {}, "there is none of volumes; choose fedavg"),
        ("fedavg", {"privacy": {"epsilon": 8}}, "is for images, not for volumes; take the table out|privacy"),
        ("fedavg", {"model": {"backbone": "resnet18"}}, "is not for volumes"),
        ("fedavg", {"task": {"name": "segmentation"}}, "take volume-segmentation"),
    ],
)
def test_what_volumes_cannot_do_is_refused_with_the_cure(method, settings, words, tiny):
    with pytest.raises(BadInput, match=words):
        tiny(method, volumes(**settings), rounds=1)


#: methods that a study of volumes can have
RUN = {
    *{"standalone", "centralized", "fedsgd", "fedavg", "fedprox", "fedavgm", "scaffold", "fedopt", "feddyn", "ditto"},
    *{"fedrep", "fedper", "finetune", "cwt", "splitnn", "fedreplay"},
}


@pytest.mark.parametrize("method", METHODS.working())
def test_every_method_takes_volumes_or_refuses_in_a_sentence_with_a_method_that_does(method):
    tables = volumes(method={"name": method})
    if method in RUN:
        assert parse_study(tables).method.name == method
        return
    with pytest.raises(BadInput, match=rf"^method\.name: [^\n]*{method}[^\n]*; choose [^\n]*$") as said:
        parse_study(tables)
    named = set(re.findall(r"[a-z-]+", str(said.value).rpartition("choose ")[2])) & set(METHODS.working())
    assert named <= RUN


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


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """A drawn brain, the same head in a turned file, and what is read of each."""
    source, folder = BrainVolumes(samples=4, shape=(24, 24, 16)), tmp_path_factory.mktemp("cases")
    raw = source.read(0, source.cases()[0])
    turned = RawVolume(raw.image[:, ::-1].copy(), None, raw.affine @ np.diag([-1.0, 1, 1, 1]))
    for name, one in (("a", raw), ("b", turned)):
        save_case(folder, name, one, source.channels)
    return folder


def test_a_bundle_prepares_and_predicts_as_we_do(fedavg, cases, tmp_path, monkeypatch):
    from monai.bundle import ConfigParser

    done = export(fedavg.folder, "monai-bundle", tmp_path / "bundle")
    assert max(done.agreement.largest_difference, done.agreement.each_alone) <= done.agreement.tolerance == 1e-4
    monkeypatch.syspath_prepend(done.folder)
    parser = ConfigParser()
    parser.read_config(done.folder / "configs" / "inference.json")
    parser.update({"bundle_root": str(done.folder), "dataset_dir": str(cases), "output_dir": str(tmp_path / "theirs")})
    parser.get_parsed_content("run")
    command = ["predict", str(fedavg.folder), str(cases), "--masks", str(tmp_path / "ours")]
    assert CliRunner().invoke(app, command).exit_code == 0
    for name in "ab":
        ours, theirs = (nibabel.load(tmp_path / whose / f"{name}.nii.gz") for whose in ("ours", "theirs"))
        np.testing.assert_allclose(theirs.affine, ours.affine)
        assert (np.asarray(ours.dataobj) == np.asarray(theirs.dataobj)).mean() > 0.9999
    assert "16 x 16 x 16 voxels" in (done.folder / "model_card.md").read_text()


FIXED = {"low": 0, "high": 900, "mean": 300, "deviation": 200}


@pytest.mark.parametrize(
    "settings",
    [
        {"spacing": (7.0, 9.0, 11.0)},
        {"normalise": "fixed", "intensities": [FIXED, FIXED, {**FIXED, "high": 500}, FIXED]},
        {"normalise": "none"},
    ],
    ids=["each case", "fixed", "none"],
)
def test_an_exported_preparation_gives_the_same_voxels(settings, cases):
    from monai.bundle import ConfigParser

    channels = BrainVolumes().channels
    card = VolumeCard(channels=channels, structures={"whole": (1,)}, preparation=Preparation(**settings))
    steps = ConfigParser({"_target_": "Compose", "transforms": steps_of(card)}).get_parsed_content("")
    files = {name: cases / f"b_{name}.nii.gz" for name in channels}
    theirs = steps({"image": [str(file) for file in files.values()]})["image"]
    ours = card.preparation.prepare(read_case(CaseFiles("b", files), channels, {}))
    np.testing.assert_array_equal(theirs.numpy(), ours.image.astype(np.float32))


def test_an_export_to_onnx_says_the_same(fedavg, tmp_path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    done = export(fedavg.folder, "onnx", tmp_path / "onnx")
    assert done.agreement.largest_difference <= 1e-4


def test_what_an_export_of_volumes_cannot_do_is_refused(fedavg, cases, tmp_path):
    with pytest.raises(BadInput, match=r"--images: .* compared on drawn patches; leave it out"):
        export(fedavg.folder, "torchscript", tmp_path / "ts", images=[cases])
    assert not (tmp_path / "ts").exists()
