"""Every example is a study; those of real images run on drawn ones when one word is changed, as their comments say."""

import re
from pathlib import Path

import pytest

from polyclinic.cli import run_app
from polyclinic.data.parts import prepare
from polyclinic.data.source import FileSource
from polyclinic.errors import BadInput
from polyclinic.runner.run.assembly import Assembly
from polyclinic.study import Study, load_study, parse_study

EXAMPLES = Path(__file__).parent.parent / "examples"
FILES = sorted(EXAMPLES.rglob("*.toml"))
#: the line that names the source, and in its comment the phantom
WORD = re.compile(r'^source = "npz"  # without these images: "([a-z]+-phantom)"$', re.MULTILINE)
REAL = [file for file in FILES if WORD.search(file.read_text(encoding="utf-8"))]


def on_phantoms(file: Path, folder: Path) -> Path:
    """A copy of the example with one word changed."""
    text = file.read_text(encoding="utf-8")
    (phantom,) = WORD.findall(text)
    changed = folder / file.name
    changed.write_text(WORD.sub(f'source = "{phantom}"', text), encoding="utf-8")
    return changed


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_example_is_a_study_that_survives_being_written_out(file):
    study = load_study(file)
    assert "format = 1\n" in file.read_text(encoding="utf-8")
    assert parse_study(study.as_tables()) == study
    assert isinstance(study.data, FileSource) == (file in REAL)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_example_passes_study_check(file, capsys):
    assert run_app(["study", "check", str(file), "--no-images"]) == 0, capsys.readouterr().err
    assert ": fine. " in capsys.readouterr().out


@pytest.mark.parametrize("file", REAL, ids=lambda file: file.stem)
def test_without_its_images_an_example_says_where_to_get_them_and_which_word_to_change(file, tmp_path, monkeypatch):
    study = load_study(file)
    assert study.data.path.parts[0] == "$POLYCLINIC_DATA"
    for place in (None, tmp_path):
        monkeypatch.delenv("POLYCLINIC_DATA", raising=False)
        if place:
            monkeypatch.setenv("POLYCLINIC_DATA", str(place))
        with pytest.raises(BadInput) as refused:
            prepare(study.data, study.sites, cache=tmp_path)
        sentence = str(refused.value)
        assert sentence.startswith("data.path: ")
        assert study.data.origin in sentence
        assert '-phantom" in [data]' in sentence


@pytest.mark.parametrize("file", REAL, ids=lambda file: file.stem)
def test_one_word_changes_an_example_to_phantoms(file, tmp_path):
    study = load_study(on_phantoms(file, tmp_path))
    few = {"data.samples": 400, "data.size": 28}  # fewer and smaller, so that they are drawn in a second
    if hasattr(study.sites, "per_class"):
        few["sites.per_class"] = study.sites.per_class * 400 // study.data.samples
    if study.data.test_total_per_class:
        few["data.test_total_per_class"] = study.data.test_total_per_class * 400 // study.data.samples
    assert_assembles(study.with_settings(few), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("file", REAL, ids=lambda file: file.stem)
def test_there_are_as_many_phantoms_as_an_example_needs(file, tmp_path):
    assert_assembles(load_study(on_phantoms(file, tmp_path)), tmp_path)


def assert_assembles(study: Study, folder: Path) -> None:
    parts = prepare(study.data, study.sites)
    assembly = Assembly(study, parts, folder)
    assert all(parts.info["counts"][site]["train"] for site in parts.names)
    assert assembly.initial_weights().keys() == assembly.build_model(None).state_dict().keys()


@pytest.mark.slow
def test_the_example_of_evaluate(tmp_path, capsys):
    assert run_app(["run", str(EXAMPLES / "evaluate.toml"), "--out", str(tmp_path / "run"), "--quiet"]) == 0
    capsys.readouterr()
    study = ["--study", str(EXAMPLES / "evaluate.toml"), "--label-map", "north:healthy=-"]
    assert run_app(["evaluate", str(tmp_path / "run"), *study]) == 0
    assert "site 'north' has no image of healthy" in capsys.readouterr().out


@pytest.mark.slow
def test_the_example_of_worth(capsys):
    assert run_app(["worth", str(EXAMPLES / "worth.toml")]) == 0
    assert "all 8 coalitions" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["label_sets", "secure_sum"])
def test_examples_of_runs(tmp_path, name):
    assert run_app(["run", str(EXAMPLES / f"{name}.toml"), "--out", str(tmp_path / "run"), "--quiet"]) == 0
