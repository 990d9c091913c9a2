"""An exported model says what the released one says, with what it needs beside it, and nothing of this machine."""

import csv
import hashlib
import importlib
import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from exported_models import CALIBRATED, HOSTILE, write_model
from PIL import Image

from polyclinic.cli import run_app
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.runner.export import export as formats
from polyclinic.runner.export.export import check_agreement, drawn_images, export
from polyclinic.runner.export.preparation import INFERENCE, metadata, write_bundle, write_preparation
from polyclinic.runner.predict.model_file import read_model_file
from polyclinic.runner.predict.predict import load_predictor

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "odd name; 'ü'", calibrations=CALIBRATED)


@pytest.fixture(scope="module")
def bundle(model):
    return export(model, "monai-bundle").folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for number, shape in enumerate([(40, 30), (28, 28), (50, 64, 3)]):
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(folder / f"ä {number}.png")
    return folder


def preparation_of(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """The package beside a model, as a program of others imports it."""
    monkeypatch.syspath_prepend(folder)
    for name in [name for name in sys.modules if name.split(".")[0] == "preparation"]:
        monkeypatch.delitem(sys.modules, name)
    return importlib.import_module("preparation")


def assert_nothing_of_this_machine(folder: Path) -> None:
    for file in (path for path in folder.rglob("*") if path.is_file()):
        content = file.read_bytes()
        for name in (str(ROOT), str(Path.home()) + "/", "site-packages"):
            assert name.encode() not in content, (file, name)


def test_the_files_of_a_torchscript_model(model, pictures, tmp_path, monkeypatch):
    done = export(model, "torchscript", tmp_path / "new" / "ts", images=[pictures])
    assert (done.agreement.images, done.agreement.what) == (3, "3 of the user's images")
    assert max(done.agreement.largest_difference, done.agreement.each_alone) <= 1e-5
    beside = preparation_of(done.folder, monkeypatch)
    predictor, theirs = load_predictor(model), formats.load_torchscript(done.file)
    for file in sorted(pictures.iterdir()):
        image = beside.prepare(file)
        assert np.array_equal(image, predictor.prepared(file, None))
        assert np.allclose(theirs(image[None]), predictor.outputs(image[None]).numpy(), atol=1e-5)
    record = json.loads((done.folder / "export.json").read_text())
    assert (record["from"]["site"], record["from"]["ensemble"]) == (None, False)
    for name, digest in record["sha256"].items():
        assert hashlib.sha256((done.folder / name).read_bytes()).hexdigest() == digest
    assert set(record["sha256"]) | {"export.json"} == {
        path.relative_to(done.folder).as_posix()
        for path in done.folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    described = json.loads((done.folder / "preparation" / "settings.json").read_text())
    assert described["classes"] == list(HOSTILE)
    assert described["calibration"]["temperature"] == 1.7
    assert_nothing_of_this_machine(done.folder)


@pytest.mark.slow
def test_onnx(model, tmp_path):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    done = export(model, "onnx", tmp_path / "onnx")
    predictor, images = load_predictor(model), drawn_images(read_model_file(model / "model.safetensors")[0])
    assert np.allclose(formats.load_onnx(done.file)(images), predictor.outputs(images).numpy(), atol=1e-5)
    assert_nothing_of_this_machine(done.folder)


@pytest.mark.parametrize(
    "wrong", [lambda p: p + 2e-5, lambda p: p * np.nan, lambda p: p[:1]], ids=["shifted", "nan", "fewer"]
)
def test_a_model_that_says_something_else_is_refused(model, wrong):
    predictor = load_predictor(model)
    ours = lambda images: predictor.outputs(images).numpy()  # noqa: E731
    images = drawn_images(predictor.card)
    assert check_agreement(ours, lambda x: ours(x) + 1e-6, images, "drawn", predictor.card).largest_difference > 0
    with pytest.raises(WorkFailed, match="exported model"):
        check_agreement(ours, lambda x: wrong(ours(x)), images, "drawn", predictor.card)


def test_values_are_compared_in_the_networks_scale(tmp_path):
    """An age of 100 months in float32 is known to some 1e-5 months only: 1e-5 is meant of the range of labels."""
    folder = write_model(tmp_path, task={"name": "regression"}, unit="months", label_range=(0.0, 240.0))
    predictor = load_predictor(folder)
    ours = lambda images: predictor.outputs(images).numpy()  # noqa: E731
    images = drawn_images(predictor.card)
    check_agreement(ours, lambda x: ours(x) + 1e-4, images, "drawn", predictor.card)
    with pytest.raises(WorkFailed):
        check_agreement(ours, lambda x: ours(x) + 1e-2, images, "drawn", predictor.card)


def test_what_cannot_be_exported_is_said_in_a_sentence(model, tmp_path, monkeypatch, capsys):
    with pytest.raises(BadInput, match=r"--to: .*torchscript"):
        export(model, "torchscrpt")
    (tmp_path / "there").mkdir()
    with pytest.raises(BadInput, match="is there already"):
        export(model, "torchscript", tmp_path / "there")
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written"):
        export(model, "torchscript", tmp_path / "file" / "below")
    monkeypatch.setattr(formats, "find_spec", lambda name: None)
    assert run_app(["export", str(model), "--to", "onnx"]) == 2
    assert "pip install 'polyclinic[export]'" in capsys.readouterr().err
    assert run_app(["export", str(tmp_path), "--to", "torchscript"]) == 2
    assert "there is no model" in capsys.readouterr().err


def test_a_failed_export_leaves_nothing(model, tmp_path, monkeypatch):
    monkeypatch.setitem(
        formats.FORMATS,
        "torchscript",
        formats.Format("model.ts", formats.write_torchscript, lambda _: lambda images: np.zeros((len(images), 4))),
    )
    with pytest.raises(WorkFailed, match="nothing was written"):
        export(model, "torchscript", tmp_path / "ts")
    assert list(tmp_path.iterdir()) == []


def test_names_in_a_bundle_are_never_evaluated(bundle):
    """MONAI evaluates texts that begin with "$", and resolves those with "@" and "%"."""
    from monai.bundle import ConfigParser

    parser = ConfigParser()
    parser.read_config(bundle / "configs" / "inference.json")
    parser.read_meta(bundle / "configs" / "metadata.json")
    parser.parse()
    assert parser.get_parsed_content("_meta_")["task"] == "classification"
    assert not Path("pwned").exists()
    names = metadata(read_model_file(bundle.parents[1] / "model.safetensors")[0])
    texts = list(names["network_data_format"]["outputs"]["pred"]["channel_def"].values())
    assert [text.partition(": ")[2] for text in texts] == list(HOSTILE)
    assert not any(name in json.dumps(INFERENCE) for name in HOSTILE if name != "@bundle_root")
    assert_nothing_of_this_machine(bundle)


def test_masks_of_a_bundle_do_not_overwrite_each_other(tmp_path, monkeypatch):
    model = write_model(tmp_path / "model", "unet", size=32, task={"name": "segmentation"})
    card = read_model_file(model / "model.safetensors")[0]
    (tmp_path / "bundle").mkdir()
    write_bundle(tmp_path / "bundle", card, "")
    write_preparation(tmp_path / "bundle", card, None)
    preparation_of(tmp_path / "bundle", monkeypatch)
    predictions = runpy.run_path(str(tmp_path / "bundle" / "scripts" / "predictions.py"))
    outputs = np.stack([np.zeros((32, 32)), np.ones((32, 32)), np.ones((32, 32))])
    batch = {"file": ["a/x.png", "b/x.png", "b/x.png"], "frame": torch.tensor([-1, 0, 1]), "pixels": outputs}
    predictions["write"]([batch], None, lambda pixels, _: pixels, tmp_path / "out")
    with (tmp_path / "out" / "predictions.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["share"]) for row in rows] == [0, 1, 1]
    masks = [np.asarray(Image.open(tmp_path / "out" / row["mask"])) for row in rows]
    assert [mask.max() for mask in masks] == [0, 255, 255]
    assert len({row["mask"] for row in rows}) == 3


@pytest.mark.slow
def test_a_bundle_runs_with_monais_own_command(bundle, model, pictures, tmp_path):
    pytest.importorskip("fire")
    command = [sys.executable, "-m", "monai.bundle", "run", "--config_file", "configs/inference.json"]
    command += ["--meta_file", "configs/metadata.json", "--dataset_dir", str(pictures), "--output_dir", str(tmp_path)]
    done = subprocess.run(command, cwd=bundle, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    with (tmp_path / "predictions.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    expected = list(load_predictor(model).predict([pictures]))
    assert [row["file"] for row in rows] == [str(one.file) for one in expected]
    for row, one in zip(rows, expected, strict=True):
        assert row["class"] == one.values["class"]
        assert float(row[f"p({HOSTILE[1]})"]) == pytest.approx(one.values[f"p({HOSTILE[1]})"], abs=1e-5)
    assert not (bundle / "pwned").exists()


@pytest.mark.slow
@pytest.mark.parametrize("to", ["onnx", "torchscript"])
@pytest.mark.parametrize(("backbone", "facts"), [
    ("small-cnn", {"size": 32}),
    ("resnet18", {"size": 32, "norm": "group", "channels": 3}),
    ("resnet18", {"size": 32, "input_size": 48}),
    ("efficientnet-lite0", {"size": 64, "channels": 3}),
    ("efficientnet-lite0-1024", {"size": 32, "input_size": 32, "head": "quadratic"}),
    ("efficientnet-lite0-2048", {"size": 32, "head": "diagonal"}),
    ("unet", {"size": 32, "task": {"name": "segmentation"}}),
    ("unet-512", {"size": 32, "task": {"name": "segmentation"}}),
    ("unet-efficientnet-lite0", {"size": 48, "channels": 3, "task": {"name": "segmentation"}}),
    ("lenet5", {"task": {"name": "regression"}, "unit": "months", "label_range": (0.0, 240.0)}),
])  # fmt: skip
def test_every_kind_of_network(backbone, facts, to, tmp_path):
    if to == "onnx":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
    done = export(write_model(tmp_path, backbone, **facts), to)
    print(backbone, to, done.agreement)
    assert done.file.is_file()
