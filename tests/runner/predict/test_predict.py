"""A released model away from its run: the same answers from files, one model or several, and what is refused."""

import csv
import io
import json
import re
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

from polyclinic.cli import run_app
from polyclinic.cli.predict import _csv
from polyclinic.data.parts import open_site, prepare
from polyclinic.errors import BadInput, Notice
from polyclinic.runner.evaluate.calibration import Calibration
from polyclinic.runner.evaluate.case_scores import read_cases, write_cases
from polyclinic.runner.predict import predict as prediction
from polyclinic.runner.predict.model_file import Card, digest_of_weights, model_file, read_model_file
from polyclinic.runner.predict.predict import BETWEEN, image_files, load_predictor, predict
from polyclinic.runner.run.run import run
from polyclinic.study import load_study

SITES = ("site-1", "site-2", "site-3")


@pytest.fixture(scope="module")
def joined(tiny, undisturbed):
    return undisturbed(tiny("fedreplay", {"model.cut": "conv1"}))


@pytest.fixture(scope="module")
def pngs(tiny, tmp_path_factory):
    """All sites' test images as PNG, which loses nothing, with the label in the name."""
    study, folder = tiny("fedreplay", {"model.cut": "conv1"}), tmp_path_factory.mktemp("images")
    parts = prepare(study.data, study.sites)
    for site in SITES:
        part = open_site(parts.folder, site).test
        for number, (image, label) in enumerate(zip(part.images, part.labels, strict=True)):
            Image.fromarray(np.moveaxis(np.asarray(image), 0, -1)).save(folder / f"{site}-{number}-{int(label)}.png")
    return folder


def test_the_joined_model_scores_on_files_what_the_run_reported(joined, pngs):
    predictor = load_predictor(joined.folder)
    classes = list(predictor.card.classes)
    found = list(predictor.predict([pngs]))
    right = [one.values["class"] == classes[int(one.file.stem.rsplit("-", 1)[1])] for one in found]
    assert np.mean(right) == pytest.approx(joined.metrics["test"]["accuracy"], abs=1e-9)
    assert all(
        sum(v for k, v in one.values.items() if k.startswith("p(")) == pytest.approx(1, abs=1e-5) for one in found
    )


def test_the_command_prints_csv_json_or_writes_a_file(joined, pngs, tmp_path, capsys):
    image = sorted(pngs.iterdir())[0]
    assert run_app(["predict", str(joined.folder), str(image)]) == 0
    printed = capsys.readouterr().out
    [row] = csv.DictReader(io.StringIO(printed))
    assert row["file"] == str(image)
    assert run_app(["predict", str(joined.folder / "model.safetensors"), str(image), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["class"] == row["class"]
    assert run_app(["predict", str(joined.folder), str(image), "--out", str(tmp_path / "found.csv")]) == 0
    assert (tmp_path / "found.csv").read_text() == printed


def test_no_text_of_a_csv_becomes_a_formula():
    rows = [{"file": "-1.png", "class": "=HYPERLINK()", "p(a)": -0.5, "set": ["@a", "b"]}, {"file": "b", "+c": 1}]
    found = list(csv.reader(io.StringIO(_csv(rows))))
    assert found[0] == ["file", "class", "p(a)", "set", "'+c"]
    assert found[1] == ["'-1.png", "'=HYPERLINK()", "-0.5", f"'@a{BETWEEN}b", ""]
    assert found[2] == ["b", "", "", "", "1"]


def test_an_ensemble_is_the_mean_of_the_sites_models(tiny, undisturbed, pngs):
    folder = undisturbed(tiny("standalone")).folder
    images = np.stack([load_predictor(folder, site="site-1").prepared(f, None) for f in sorted(pngs.iterdir())])
    each = [load_predictor(folder, site=site).outputs(images) for site in SITES]
    assert not torch.allclose(each[0], each[1])
    together = load_predictor(folder, ensemble=True).outputs(images)
    torch.testing.assert_close(together, torch.stack(each).mean(0))


def test_a_regression_speaks_in_the_labels_unit(tiny, undisturbed, pngs):
    study = tiny("fedavg", {"data.source": "hand-phantom", "task.name": "regression", "optimizer.lr": 0.001})
    predictor = load_predictor(undisturbed(study).folder)
    [found] = predictor.predict([sorted(pngs.iterdir())[0]])
    assert set(found.values) == {"months", "low_90", "high_90"}
    assert found.values["low_90"] < found.values["months"] < found.values["high_90"]
    low, high = predictor.card.label_range
    assert low - 60 < found.values["months"] < high + 60
    unsure = replace(predictor, calibration=Calibration(cases=20, quantiles={"0.9": 10 * high}))
    [found] = unsure.predict([sorted(pngs.iterdir())[0]])
    assert (found.values["low_90"], found.values["high_90"]) == (low, high)  # nobody is younger than newborn


def test_masks_are_written_as_pictures(tiny, undisturbed, pngs, tmp_path, capsys):
    settings = {"data.source": "brain-phantom", "task.name": "segmentation", "model.backbone": "unet", "data.size": 32}
    folder = undisturbed(tiny("fedavg", settings, rounds=1)).folder
    images = [str(file) for file in sorted(pngs.iterdir())[:2]]
    assert run_app(["predict", str(folder), *images, "--masks", str(tmp_path / "masks"), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    drawn = [np.asarray(Image.open(file)) for file in sorted((tmp_path / "masks").iterdir())]
    assert [int((mask > 0).sum()) for mask in drawn] == [row["pixels"] for row in rows]


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["--site", "site-1"], "--site: .* one model for all sites"),
    (["--ensemble"], "--ensemble: .* one model for all sites"),
    (["--site", "site-1", "--ensemble"], "--site: names one model, and --ensemble takes all"),
    (["--masks", "x"], "--masks: this model does not draw masks"),
    (["--json", "--out", "x.csv"], "--json: prints"),
    (["--out", f"{__file__}/x.csv"], "is a file, not a folder"),
])  # fmt: skip
def test_flags_that_do_not_fit_are_named(joined, pngs, arguments, sentence, capsys):
    image = str(sorted(pngs.iterdir())[0])
    assert run_app(["predict", str(joined.folder), image, *arguments]) == 2
    assert re.search(sentence, capsys.readouterr().err)


def test_images_of_an_archive_get_the_answers_of_the_same_images_in_files(joined, pngs, tmp_path, capsys):
    files = sorted(pngs.iterdir())[:3]
    np.savez(tmp_path / "a.npz", scans=np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files]))
    assert run_app(["predict", str(joined.folder), str(tmp_path / "a.npz")]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["image"] for row in rows] == ["0", "1", "2"]
    assert run_app(["predict", str(joined.folder), *map(str, files)]) == 0
    own = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["class"] for row in rows] == [row["class"] for row in own]


def test_masks_beside_images_are_not_predicted(tmp_path):
    """Whatever the model does: a classifier would say a class of a mask, too."""
    for name in ("a.png", "a_mask.png", "masks/b.png", "b.png", "c_seg.png", "p1/image.png", "p1/mask.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("L", (8, 8)).save(tmp_path / name)
    with pytest.warns(Notice, match="3 files are masks of the others, such as a_mask.png: not predicted"):
        found = image_files([tmp_path])
    assert [file.name for file in found] == ["a.png", "b.png", "c_seg.png", "image.png"]
    assert image_files([tmp_path / "p1" / "mask.png"]), "a file that is named itself is predicted"


def test_files_that_do_not_fit_are_named(joined, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"not an image")
    (tmp_path / "empty").mkdir()
    save_file({"weight": torch.zeros(2)}, tmp_path / "foreign.safetensors")
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    np.savez(tmp_path / "grades.npz", left=np.zeros((2, 28, 28), np.uint8), right=np.zeros((2, 28, 28), np.uint8))
    predictor = load_predictor(joined.folder)
    for name, words in {
        "broken.png": r"broken\.png: cannot be read",
        "grades.npz": r"grades\.npz: .*which array are the images\? it has left \[2, 28, 28\], right",
        "empty": "empty: holds no image",
        "gone": "gone: there is no such file",
    }.items():
        with pytest.raises(BadInput, match=words):
            list(predictor.predict([tmp_path / name]))
    models = {"foreign.safetensors": "does not say what network", "junk.safetensors": "damaged or not a model"}
    for name, words in (models | {".": "there is no model"}).items():
        with pytest.raises(BadInput, match=words):
            load_predictor(tmp_path / name)


def test_a_bad_file_is_named_and_skipped_unless_strict(joined, pngs, tmp_path, capsys):
    good = sorted(pngs.iterdir())[0]
    bad = tmp_path / "broken \u00fc.png"
    bad.write_bytes(b"not an image")
    arguments = ["predict", str(joined.folder), str(bad), str(good), "--json"]
    assert run_app(arguments) == 0
    printed = capsys.readouterr()
    assert [json.loads(line)["file"] for line in printed.out.splitlines()] == [str(good)]
    assert re.search(r"broken \u00fc\.png: cannot be read as an image: .*; skipped", printed.err)
    assert run_app([*arguments, "--strict"]) == 2
    assert capsys.readouterr().out == ""
    assert run_app(["predict", str(joined.folder), str(bad)]) == 2
    assert "none of the 1 files can be read" in capsys.readouterr().err
    with pytest.warns(Notice, match="skipped"):
        assert len(predict(joined.folder, [bad, good], strict=False)) == 1


def test_a_damaged_model_is_refused_wherever_the_bit_lies(joined, tmp_path):
    """Weights, card and the whole file: no flipped bit is taken. Only the run's record notices one in the card."""
    shutil.copy(joined.folder / "result.json", tmp_path)
    whole, file = (joined.folder / "model.safetensors").read_bytes(), tmp_path / "model.safetensors"
    file.write_bytes(whole)
    assert load_predictor(tmp_path)
    inside_card = whole.index(b"squash")
    for place in (3, inside_card, whole.index(b"classes") + 12, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(BadInput, match=r"is damaged|is not the model that result\.json"):
            load_predictor(tmp_path)
    (tmp_path / "result.json").unlink()
    with pytest.raises(BadInput, match="its weights are not those that its card names"):
        load_predictor(tmp_path)
    (tmp_path / "result.json").write_text("{}")
    file.write_bytes(whole)
    with pytest.raises(BadInput, match=r"result\.json: is damaged"):
        load_predictor(tmp_path)


@pytest.mark.parametrize(("change", "sentence"), [
    ({"task": {"name": "telepathy"}}, "task: no such choice: 'telepathy'"),
    ({"task": {}}, "task: no such choice: 'None'"),
    ({"task": {"name": "classification", "label_smoothing": 7}}, "task: 1 validation error"),
    ({"backbones": {}}, "card.backbones: dictionary should have at least 1 item"),
    ({"backbones": {"": "no-such-network"}}, "no-such-network"),
    ({"backbones": {"": "small-cnn"}}, r"tensors of the network|not of the network that its card names"),
    ({"classes": ["a", "b", "c", "d", "e"]}, "its weights are not of the network that its card names"),
    ({"size": 10**6}, r"polyclinic \(card\.size: must be sides from 1 to 2048 \(it is 1000000\)\); fetch"),
    ({"size": [16, 16, 10**6]}, r"polyclinic \(card\.size: must be sides from 1 to 2048 \(it is \[16, 16, 1000000\]"),
    ({"input_size": 10**9}, r"polyclinic \(card\.input_size: must be less than or equal to 2048 \(it is 1000000000\)"),
    ({"size": 2048}, r"not of the network that its card names \('\w+\.weight' is \(\d+, \d+\), not"),
])  # fmt: skip
def test_a_card_that_does_not_fit_is_one_sentence(joined, tmp_path, change, sentence, capsys):
    """Whoever sends a model may write any card; the weights have their digest, and the card alone has none."""
    card, tensors = read_model_file(joined.folder / "model.safetensors")
    told = {**card.model_dump(mode="json"), **change}
    file = tmp_path / "model.safetensors"
    save_file({name: one.contiguous() for name, one in tensors.items()}, file, {"polyclinic": json.dumps(told)})
    assert run_app(["predict", str(file), str(file)]) == 2
    assert re.search(sentence, " ".join(capsys.readouterr().err.split()))


def test_sets_intervals_and_thresholds_stand_in_the_table(joined, pngs, tmp_path, capsys):
    card, tensors = read_model_file(joined.folder / "model.safetensors")
    fitted = Calibration(cases=30, temperature=2.0, quantiles={"0.9": 0.999999}, thresholds={"0.95": 0.0})
    (tmp_path / "model.safetensors").write_bytes(
        model_file(tensors, card.model_copy(update={"calibrations": {"": fitted}}))
    )
    plain = card.model_copy(update={"calibrations": {}})
    (tmp_path / "plain.safetensors").write_bytes(model_file(tensors, plain))
    image = sorted(pngs.iterdir())[0]
    [found] = predict(tmp_path / "model.safetensors", [image], specificity=0.95)
    [before] = predict(tmp_path / "plain.safetensors", [image])
    assert found.values["positive_95"] is True
    assert set(found.values["set_90"]) <= set(card.classes)
    highest = max(value for name, value in found.values.items() if name.startswith("p("))
    assert highest < max(value for name, value in before.values.items() if name.startswith("p("))
    assert not any(name.startswith("set") for name in before.values)
    assert run_app(["predict", str(tmp_path / "model.safetensors"), str(image)]) == 0
    assert " | ".join(found.values["set_90"]) in capsys.readouterr().out
    for flags, words in ((["--coverage", "0.7"], "choose one of"), (["--specificity", "0.9"], "choose one of 0.95")):
        assert run_app(["predict", str(tmp_path / "model.safetensors"), str(image), *flags]) == 2
        assert words in capsys.readouterr().err


def test_a_missing_set_is_explained_on_stderr(joined, pngs, tmp_path, capsys):
    card, tensors = read_model_file(joined.folder / "model.safetensors")
    plain = model_file(tensors, card.model_copy(update={"calibrations": {}}))
    (tmp_path / "model.safetensors").write_bytes(plain)
    cases = read_cases(joined.folder, "validation")
    write_cases(replace(cases.take(np.arange(8)), patients=np.array([0, 0, 1, 2, 3, 4, 5, 6])), tmp_path, "validation")
    image = str(sorted(pngs.iterdir())[0])

    def said(model, *flags):
        assert run_app(["predict", str(model), image, *flags]) == 0
        return capsys.readouterr().err.strip()

    assert said(tmp_path) == "no set_90: a calibration needs 10 validation patients, this run had 7"
    assert said(tmp_path / "model.safetensors") == "no set_90: the model has no calibration"
    assert said(joined.folder) == ""
    (tmp_path / "cases" / "validation.npz").write_bytes(b"damaged")
    assert said(tmp_path) == "no set_90: the model has no calibration"
    few = Calibration(cases=12, temperature=1.0, quantiles={"0.8": 0.9, "0.9": 0.9})
    update = {"calibrations": {"": few}}
    (tmp_path / "model.safetensors").write_bytes(model_file(tensors, card.model_copy(update=update)))
    wanted = "no set_95: a calibration needs 19 validation patients, this run had 12"
    assert said(tmp_path, "--coverage", "0.95") == wanted


def test_models_without_a_part_or_of_each_site_say_so(joined, tmp_path, tiny, undisturbed):
    """As a coordinator gets it from deployed sites with batch-norm layers, or whole models, of their own."""
    with safe_open(joined.folder / "model.safetensors", "pt") as file:
        card = Card.model_validate_json(file.metadata()["polyclinic"])
    card = card.model_copy(update={"weights_sha256": digest_of_weights({})})
    (tmp_path / "model.safetensors").write_bytes(model_file({}, card))
    with pytest.raises(BadInput, match=r"lacks \d+ tensors .* predict at a site"):
        load_predictor(tmp_path)
    folder = undisturbed(tiny("standalone")).folder
    with pytest.raises(BadInput, match=r"each site has a model of its own .* site-1, site-2, site-3"):
        load_predictor(folder)
    with pytest.raises(BadInput, match="no model of site 'nobody'"):
        load_predictor(folder, site="nobody")


NETWORK = """
from torch import nn

print("imported")


class Net(nn.Sequential):
    def __init__(self, in_channels: int, num_classes: int, image_size: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes))
"""


@pytest.fixture
def trained(tiny, tmp_path, monkeypatch):
    """A run with a network of an importable module, and the module's file."""
    file = tmp_path / "modules" / "some_nets.py"
    file.parent.mkdir()
    file.write_text(NETWORK)
    monkeypatch.syspath_prepend(file.parent)
    done = run(tiny("fedavg", {"model.backbone": "some_nets:Net"}, rounds=1), tmp_path / "run")
    yield done.folder, file
    sys.modules.pop("some_nets", None)


def test_a_model_does_not_choose_what_is_imported(trained, capsys):
    folder, _ = trained
    del sys.modules["some_nets"]
    capsys.readouterr()
    words = r"needs code of the module 'some_nets', and a model does not choose .*; .* add --allow-import some_nets$"
    for allowed in ([], ["some"], ["some_nets.further"]):
        with pytest.raises(BadInput, match=words):
            prediction.load_predictor(folder, allow_import=allowed)
    assert run_app(["predict", str(folder), str(folder)]) == 2
    assert "some_nets" not in sys.modules
    assert prediction.load_predictor(folder / "model.safetensors", allow_import=["some_nets"]).task.name
    assert run_app(["predict", str(folder), str(folder), "--allow-import", "some_nets"]) == 2
    assert "holds no image" in capsys.readouterr().err


def test_a_plugin_module_in_a_card_is_allowed_first(trained, tmp_path):
    folder, _ = trained
    card, tensors = read_model_file(folder / "model.safetensors")
    forged = card.model_copy(update={"backbones": {"": "lenet5"}, "networks": {}, "plugins": {"antigravity": "0" * 64}})
    (tmp_path / "model.safetensors").write_bytes(model_file(tensors, forged))
    with pytest.raises(BadInput, match="add --allow-import antigravity"):
        prediction.load_predictor(tmp_path / "model.safetensors")
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("key", ["installed", "networks"])
def test_a_network_that_has_changed_is_refused_by_resume_audit_and_predict(trained, capsys, key):
    """`networks`: as older versions wrote it."""
    folder, file = trained
    noted = json.loads((folder / "plugins.json").read_text())["installed"]
    assert list(noted) == ["some_nets:Net"]
    (folder / "plugins.json").write_text(json.dumps({"plugins": {}, key: noted}))
    load_study(folder / "study.toml")
    file.write_text(NETWORK + "\n# another line\n")
    words = r"was made with some_nets:Net as it was then, and its package has changed"
    with pytest.raises(BadInput, match=words):
        load_study(folder / "study.toml")
    with pytest.raises(BadInput, match=words):
        prediction.load_predictor(folder, allow_import=["some_nets"])
    for command in (["audit"], ["forgetting"], ["run", "--resume", "--out"]):
        assert run_app([*command, str(folder)]) == 2
        said = capsys.readouterr().err
        assert "has changed (SHA-256 " in said
        assert said.endswith("; install that version again, or run the study in another folder\n")
