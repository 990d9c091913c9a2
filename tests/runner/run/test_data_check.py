"""`polyclinic study check` counts images and compares a file of weights where a run would refuse them."""

import re

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from polyclinic.cli import run_app
from polyclinic.data.datasets.table import Csv
from polyclinic.data.partitions.base import Column, Iid
from polyclinic.data.parts import prepare
from polyclinic.errors import BadInput
from polyclinic.models import build
from polyclinic.runner.run import data_check as files_check
from polyclinic.runner.run.data_check import check_files, data_hints

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
