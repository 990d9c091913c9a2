"""Every example is a study; those of real images run on drawn ones when one word is changed, as their comments say."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from polyclinic.cli import run_app
from polyclinic.data.parts import open_site, prepare
from polyclinic.data.source import FileSource
from polyclinic.deployment.kits import first_policy
from polyclinic.errors import BadInput
from polyclinic.runner.run.assembly import Assembly
from polyclinic.study import Study, load_study, parse_study
from polyclinic.study.policy_check import Counts, refused_by

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


SETS = [file for file in REAL if file.parent.name == "data"]
#: one example of each phantom, unless the images of all are here
TRIED = SETS if os.environ.get("POLYCLINIC_DATA") else {WORD.findall(one.read_text())[0]: one for one in SETS}.values()


@pytest.mark.slow
@pytest.mark.parametrize("file", TRIED, ids=lambda file: file.stem)
def test_the_study_that_is_written_for_images_leaks_nothing_and_a_new_kit_lets_it_run(file, tmp_path, monkeypatch):
    """`study new --for`, `run`, `audit`, with nothing changed, on 300 images of the example."""
    monkeypatch.chdir(tmp_path)
    few = {"data.size": 32} if len(TRIED) == len(SETS) else {"data.samples": 300, "data.size": 32}
    like = load_study(file if len(TRIED) == len(SETS) else on_phantoms(file, tmp_path)).with_settings(few)
    drawn = like.data.load()
    images = drawn.take(np.random.default_rng(0).permutation(len(drawn))[:300])
    what = {"labels": np.array(images.classes)[images.labels] if images.classes else images.labels}
    what = {"masks": images.masks} if like.task.dense else what
    sites = {} if images.site is None else {"site": images.site}
    np.savez("own.npz", images=np.moveaxis(images.images, 1, -1), **what, **sites)
    for command in ("study new own.toml --for own.npz", "run own.toml --out run --quiet --no-report", "audit run"):
        assert run_app(command.split()) == 0
    verdicts = json.loads(Path("run/audit.json").read_text())["verdicts"]
    assert verdicts
    assert "leaks" not in [one["verdict"] for one in verdicts.values()], verdicts
    study, policy = load_study("own.toml"), first_policy().model_copy(update={"deployed": True})
    parts = prepare(study.data, study.sites)
    for site in parts.names:
        own = Counts.of(open_site(parts.folder, site).train, tuple(parts.info["classes"]))
        assert refused_by(study, policy, own, len(parts.names)) == []


@pytest.mark.slow
def test_the_study_that_comes_with_polyclinic_leaks_nothing(tmp_path, monkeypatch):
    """Nor by its scores, which of few images in fine bins would tell who was scored."""
    monkeypatch.chdir(tmp_path)
    for command in ("run --out run --quiet --no-report --set data.samples=600 --set method.rounds=4", "audit run"):
        assert run_app(command.split()) == 0
    report = json.loads(Path("run/audit.json").read_text())
    assert "leaks" not in [one["verdict"] for one in report["verdicts"].values()], report["verdicts"]
    assert "add_final_scores" in {one["operation"] for one in report["parcels"]}


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
