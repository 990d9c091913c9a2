"""The examples of what hospitals ask for before they train, and of sums that nobody can open, as their pages say."""

from pathlib import Path

import pytest

from polyclinic.cli import run_app

EXAMPLES = Path(__file__).parents[3] / "examples"


def example(name):
    return str(EXAMPLES / f"{name}.toml")


def test_the_example_of_inspect(tmp_path, capsys):
    picture = tmp_path / "sites.png"
    assert run_app(["data", "inspect", example("inspect"), "--federated", "--out", str(picture)]) == 0
    said = capsys.readouterr().out
    assert "KS of the intensities" in said
    assert picture.stat().st_size > 5000


@pytest.mark.slow
def test_the_example_of_evaluate(tmp_path, capsys):
    assert run_app(["run", example("evaluate"), "--out", str(tmp_path / "run"), "--quiet"]) == 0
    capsys.readouterr()
    asked = ["evaluate", str(tmp_path / "run"), "--study", example("evaluate"), "--label-map", "north:healthy=-"]
    assert run_app(asked) == 0
    assert "site 'north' has no image of healthy" in capsys.readouterr().out


@pytest.mark.slow
def test_the_example_of_worth(capsys):
    assert run_app(["worth", example("worth"), "--retrainings", "7"]) == 0
    assert "7 runs of the study" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["label_sets", "secure_sum"])
def test_examples_of_runs(tmp_path, name):
    assert run_app(["run", example(name), "--out", str(tmp_path / "run"), "--quiet"]) == 0
