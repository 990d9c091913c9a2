"""Runs that begin with weights of a file, and what a check counts of images before a run."""

import hashlib
import json
import re

import numpy as np
import pytest
import torch
from processes import ForkedWorker
from safetensors.torch import save_file

from polyclinic.cli import run_app
from polyclinic.data.datasets.table import Csv
from polyclinic.data.partitions.base import Column, Iid
from polyclinic.data.parts import prepare
from polyclinic.errors import BadInput
from polyclinic.federation.policy import Policy
from polyclinic.models import build
from polyclinic.runner.run import data_check as files_check
from polyclinic.runner.run import engines
from polyclinic.runner.run.assembly import Assembly
from polyclinic.runner.run.data_check import check_files, data_hints
from polyclinic.runner.run.run import run


@pytest.fixture
def file(tiny, undisturbed, tmp_path):
    """The weights of a run, all but two of them, as torch writes them."""
    weights = undisturbed(tiny("fedavg", rounds=1)).weights()
    del weights["fc3.weight"], weights["fc3.bias"]
    torch.save(weights, tmp_path / "first.pt")
    return tmp_path / "first.pt"


def assembly_of(study, folder, **more):
    return Assembly(study, prepare(study.data, study.sites), folder, **more)


def test_a_run_begins_with_the_weights_of_the_file_and_notes_which(tiny, file, tmp_path, monkeypatch):
    study = tiny("fedavg", {"model.weights": str(file)}, rounds=1)
    result = run(study, tmp_path / "run")
    noted = json.loads((result.folder / "weights.json").read_text())
    assert noted["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert (noted["file"], noted["missing"]) == ("first.pt", ["fc3.weight", "fc3.bias"])
    assert (len(noted["loaded"]), noted["unused"], noted["other_shape"]) == (8, [], [])
    first, saved = assembly_of(study, tmp_path / "run").initial_weights(), torch.load(file, weights_only=True)
    assert all(torch.equal(first[name], tensor) for name, tensor in saved.items())
    drawn = assembly_of(tiny("fedavg", rounds=1), tmp_path).initial_weights()
    assert torch.equal(first["fc3.weight"], drawn["fc3.weight"])
    # by worker processes the same
    monkeypatch.setattr(engines, "WorkerProcess", ForkedWorker)
    workers = tiny("fedavg", {"model.weights": str(file), "engine.workers": 2}, rounds=1)
    assert run(workers, tmp_path / "workers")["weights_sha256"] == result["weights_sha256"]
    assert run(tiny("fedavg", rounds=1), tmp_path / "drawn")["weights_sha256"] != result["weights_sha256"]


def test_a_resumed_run_takes_the_same_file_wherever_it_lies_now(tiny, file, tmp_path):
    study = tiny("fedavg", {"model.weights": str(file)}, rounds=1)
    result = run(study, tmp_path / "run")
    (result.folder / "result.json").unlink()
    moved = file.rename(tmp_path / "moved.pt")
    with pytest.raises(BadInput, match=r"model\.weights: '.*first\.pt' cannot be read"):
        run(None, tmp_path / "run", resume=True)
    again = run(study.with_settings({"model.weights": str(moved)}), tmp_path / "run", resume=True)
    assert again["weights_sha256"] == result["weights_sha256"]
    (result.folder / "result.json").unlink()
    weights = torch.load(moved, weights_only=True)
    torch.save({name: tensor + 1 for name, tensor in weights.items()}, file)
    with pytest.raises(BadInput, match=r"first\.pt' is not the file that .* was begun with"):
        run(study, tmp_path / "run", resume=True)
    with pytest.raises(BadInput, match="model: differs from the study"):
        run(tiny("fedavg", rounds=1), tmp_path / "run", resume=True)


def test_a_file_that_does_not_fit_is_refused_before_anything_is_written(tiny, tmp_path, capsys):
    torch.save({"encoder.weight": torch.ones(2)}, tmp_path / "other.pt")
    study = tiny("fedavg", {"model.weights": str(tmp_path / "other.pt")})
    with pytest.raises(BadInput, match=r"no tensor of .*other\.pt' fits lenet5"):
        run(study, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (tmp_path / "study.toml").write_text(study.with_settings({"model.weights": "nowhere.pt"}).to_toml())
    assert run_app(["study", "check", str(tmp_path / "study.toml")]) == 2
    assert "model.weights: 'nowhere.pt' cannot be read" in capsys.readouterr().err


def test_a_deployed_site_reads_no_file_that_a_study_names(tiny, tmp_path):
    study = tiny("fedavg", {"model.weights": "/etc/hostname"})
    site = assembly_of(study, tmp_path, policy=Policy())
    drawn = assembly_of(tiny("fedavg"), tmp_path).initial_weights()
    assert all(torch.equal(tensor, drawn[name]) for name, tensor in site.initial_weights().items())
    at_sites = {"source": "at-sites", "dataset": "scans", "size": 28, "classes": ["clear", "ill"]}
    sites = {"partition": "iid", "names": ["north", "south"]}
    with pytest.raises(BadInput, match=r"model\.weights: sites of 'fedbn' keep a part of the network"):
        tiny("fedbn", {"data": at_sites, "sites": sites, "model.backbone": "small-cnn", "model.weights": "first.pt"})


TASK = {"hand-phantom": {"task": {"name": "regression"}}}


def weights_of(backbone, file, **more):
    tensors = build(backbone, channels=3, outputs=2, size=28, norm="batch").state_dict() | more
    save_file(tensors, file) if file.suffix == ".safetensors" else torch.save(tensors, file)
    return str(file)


def test_images_are_counted_where_they_decide_and_only_there(tiny, monkeypatch):
    assert check_files(tiny("fedavg", {"data.fold": "1/4"}))[0].endswith("test images: 24")  # of 96
    (sentence,) = check_files(tiny("fedavg", {"data.test_per_class": 1}))
    assert sentence == "train images: 63, validation images: 14, test images: 6"  # one for each of 3 sites, 2 classes
    with pytest.raises(BadInput, match="97 folds need as many patients, and there are 96"):
        check_files(tiny("fedavg", {"data.fold": "1/97"}))
    with pytest.raises(BadInput, match=r"data\.test_per_class: site 'site-1' has \d+ test images .* 50 are wanted"):
        check_files(tiny("fedavg", {"data.test_per_class": 50}))
    with pytest.raises(BadInput, match=r"data\.test_total_per_class: there are \d+ test images"):
        check_files(tiny("fedavg", {"data.test_total_per_class": 50}))
    monkeypatch.setattr(files_check, "spread", None)
    assert check_files(tiny("fedavg")) == []


SOURCES = ("fundus-phantom", "hand-phantom", "chest-phantom", "brain-phantom", "skin-phantom")


@pytest.mark.parametrize("source", SOURCES)
def test_counting_without_drawing_counts_what_is_drawn(tiny, source):
    """The fast path against the slow one."""
    data = tiny("fedavg", {"data.source": source, "data.fold": "2/3"} | TASK.get(source, {})).data
    counted, drawn = data.without_pixels(), data.load()
    assert counted.images.shape == drawn.images.shape
    assert not counted.images.any()
    assert np.array_equal(counted.labels, drawn.labels)
    assert counted.classes == drawn.classes
    assert all(np.array_equal(getattr(counted, name), getattr(drawn, name)) for name in ("site", "patient", "subgroup"))


def test_files_are_counted_without_being_prepared(tiny, tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 255, (60, 28, 28), dtype=np.uint8), rng.integers(0, 2, 60)
    np.savez(tmp_path / "a.npz", images=images, labels=labels, site=np.array(["a", "b", "c"] * 20))
    data = {"source": "npz", "path": str(tmp_path / "a.npz"), "size": 28, "test_per_class": 1, "per_class": 20}
    study = tiny("fedavg", {"data": data, "sites": {"partition": "column"}})
    counts = prepare(study.data, study.sites).info["counts"].values()
    sums = [f"{name} images: {sum(own[name] for own in counts)}" for name in ("train", "validation", "test")]
    monkeypatch.setattr(files_check, "prepare", None)
    assert check_files(study) == [", ".join(sums)]


def test_sites_that_differ_by_their_images_need_the_pixels(tiny):
    study = tiny("fedavg", {"data.fold": "1/4", "sites": {"partition": "clusters", "count": 2}})
    counts = prepare(study.data, study.sites).info["counts"].values()
    assert check_files(study)[0].startswith(f"train images: {sum(own['train'] for own in counts)},")


@pytest.mark.parametrize("end", ["pt", "safetensors"])
def test_the_names_in_a_file_of_weights_are_looked_at(tiny, tmp_path, end):
    fits = weights_of("lenet5", tmp_path / f"fits.{end}", **{"my.own": torch.ones(1)})
    found = check_files(tiny("fedavg", {"model.weights": fits}))
    assert found == [f"{fits}: 10 of 11 tensors have names of lenet5; the run compares their shapes"]
    other = weights_of("resnet18", tmp_path / f"other.{end}")
    (warning,) = check_files(tiny("fedavg", {"model.weights": other}))  # both have a conv1
    assert re.match(rf"WARNING: {other}: only 1 of 1\d\d tensors have names of lenet5; it may be a file of", warning)
    tensors, none = {"body.weight": torch.ones(2)}, tmp_path / f"none.{end}"
    save_file(tensors, none) if end == "safetensors" else torch.save(tensors, none)
    with pytest.raises(
        BadInput, match=rf"no tensor of '{none}' fits lenet5: the file has body\.weight, the network co"
    ):
        check_files(tiny("fedavg", {"model.weights": str(none)}))


@pytest.mark.slow
def test_weights_of_somebody_elses_network_are_compared_with_the_network_of_these_images(tiny, tmp_path):
    pytest.importorskip("monai")
    model = {"backbone": "monai.networks.nets:Classifier", "arguments": {"channels": [4, 8], "strides": [2, 2]}}
    network = build(**model, channels=3, outputs=2, size=28)
    torch.save(network.state_dict() | {"more": torch.ones(1)}, tmp_path / "fits.pt")
    counted, sentence = check_files(tiny("fedavg", {"model": model | {"weights": str(tmp_path / "fits.pt")}}))
    assert counted.startswith("train images: ")
    assert re.search(r"fits\.pt: (\d+) of \1 tensors loaded; 1 in the file not used \(network\.more\)$", sentence)


def test_images_that_are_not_here_are_not_counted(tiny, tmp_path):
    away = {"source": "npz", "path": str(tmp_path / "away.npz"), "size": 28, "fold": "1/4"}
    assert check_files(tiny("fedavg", {"data": away})) == ["the images are not here, and were not counted"]
    fits = weights_of("lenet5", tmp_path / "lenet5.pt")
    said = check_files(tiny("fedavg", {"data": away, "model.weights": fits}))[1]
    assert said == f"{fits}: 10 of 10 tensors have names of lenet5; the run compares their shapes"


HEAD = "path,label,site,patient,age,id,region,number"


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Sixty rows: two classes, three sites of which one has three images, thirty patients."""
    file = tmp_path_factory.mktemp("hints") / "t.csv"
    sites = ["A"] * 37 + ["B"] * 20 + ["C"] * 3
    rows = [f"{n}.png,{'ab'[n % 2]},{sites[n]},p{n // 2},{n % 19 + 1},n{n},{sites[n]},{n}" for n in range(60)]
    file.write_text("\n".join([HEAD, *rows]) + "\n")
    return file


def hints(table, sites=None, **settings):
    return data_hints(Csv(path=table, **settings), sites or Iid(partition="iid", count=2))


def test_a_study_that_is_fine_gets_no_hint(table):
    assert hints(table) == []
    assert hints(table, label="age", label_range=(0, 20)) == []


@pytest.mark.parametrize(("settings", "sentence"), [
    ({"label": "age"}, "hint: the labels are 19 different numbers; if they are values and not classes"),
    ({"label": "number"}, "hint: 60 classes for 60 images; does data.label name the right column?"),
    ({"label": "id"}, "hint: 60 classes for 60 images; does data.label name the right column?"),
    ({"label": "age", "label_range": (0, 228)}, "hint: labels are from 1 to 19, and data.label_range is from 0 to"),
    ({"patient": "site", "site": ""}, "hint: 60 images are of 3 patients, which stay together"),
    ({"patient": "region"}, "hint: each site has one patient; does the setting for patients name the right"),
])  # fmt: skip
def test_a_wrong_column_gets_a_hint(table, settings, sentence):
    try:
        (found,) = hints(table, **settings)
    except BadInput as error:  # so few patients that a site has none
        found = str(error).splitlines()[-1]
    assert found.startswith(sentence)


@pytest.mark.parametrize(("labels", "words"), [
    ("a" * 37 + "b" * 23, "tells the class of 100% of the images (the most frequent class has 62%)"),
    ("a" * 36 + "b" * 24, "tells the class of 98% of the images (the most frequent class has 60%)"),
    ("a" * 28 + "b" * 32, None),  # 9 of 60 are left open, more than a quarter of 28
    ("a" * 60, None),
])  # fmt: skip
def test_a_class_that_is_nearly_the_hospital_is_said(tmp_path, labels, words):
    """Sites A, B and C have 37, 20 and 3 images."""
    rows = [f"{n}.png,{label},{'A' if n < 37 else 'B' if n < 57 else 'C'}" for n, label in enumerate(labels)]
    (tmp_path / "t.csv").write_text("\n".join(["path,label,site", *rows]) + "\n")
    found = [hint for hint in hints(tmp_path / "t.csv") if "the site alone" in hint]
    assert [str(words) in hint for hint in found] == ([True] if words else [])


def test_sites_with_very_few_images_are_named(table):
    (found,) = hints(table, Column(partition="column"))
    assert found.startswith("hint: sites with very few images: C (")
    assert "join them, or leave them out with sites.names" in found
    assert hints(table, Column(partition="column", names=("A", "B"))) == []
    (found,) = hints(table, Column(partition="column"), site="age")
    assert found == "hint: the sites are 19 different numbers; does data.site name the right column?"


def test_a_study_with_a_placeholder_says_what_to_edit(tmp_path, capsys):
    file = str(tmp_path / "s.toml")
    assert run_app(["study", "new", file, "--source", "csv"]) == 0
    said = capsys.readouterr().out
    assert f"write where your images are into data.path, then: polyclinic study check {file}" in said
    assert "run it with" not in said
    assert run_app(["study", "new", file, "--force"]) == 0
    assert f"run it with: polyclinic run {file}" in capsys.readouterr().out
