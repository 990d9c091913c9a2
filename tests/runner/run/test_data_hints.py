"""Hints of `study check` about columns that exist and are the wrong ones; no image is read for them."""

from __future__ import annotations

import pytest

from polyclinic.cli import run_app
from polyclinic.data.datasets.table import Csv
from polyclinic.data.partitions.base import Column, Iid
from polyclinic.runner.run.data_check import data_hints

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


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"label": "age"}, "hint: the labels are 19 different numbers; if they are values and not classes"),
        ({"label": "number"}, "hint: 60 classes for 60 images; does data.label name the right column?"),
        ({"label": "id"}, "hint: 60 classes for 60 images; does data.label name the right column?"),
        ({"label": "age", "label_range": (0, 228)}, "hint: labels are from 1 to 19, and data.label_range is from 0 to"),
        ({"patient": "site", "site": ""}, "hint: 60 images are of 3 patients, which stay together"),
        ({"patient": "region"}, "hint: each site has one patient; does the setting for patients name the right"),
    ],
)
def test_a_wrong_column_gets_a_hint(table, settings, sentence):
    (found,) = hints(table, **settings)
    assert found.startswith(sentence)


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ("a" * 37 + "b" * 23, "tells the class of 100% of the images (the most frequent class has 62%)"),
        ("a" * 36 + "b" * 24, "tells the class of 98% of the images (the most frequent class has 60%)"),
        ("a" * 28 + "b" * 32, None),  # 9 of 60 are left open, more than a quarter of 28
        ("a" * 60, None),
    ],
)
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
