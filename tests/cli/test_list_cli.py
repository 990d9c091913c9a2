"""`polyclinic list`: every registry, in the terminal and as JSON, with plug-ins and with packages that are broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_registry import install

from polyclinic.cli import run_app
from polyclinic.cli.plugins import KINDS

EVERYTHING = Path(__file__).parents[1] / "plugin_everything.py"


def listed(capsys, *arguments: str) -> dict[str, dict[str, str]]:
    assert run_app(["list", *arguments, "--json"]) == 0
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_listed_with_a_sentence_and_an_origin(capsys, kind):
    rows = listed(capsys, kind)
    assert rows
    assert all(row["summary"] and row["from"] == "polyclinic" for row in rows.values())
    assert run_app(["list", kind]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(rows)
    assert all(line.endswith("[polyclinic]") for line in lines)


def test_a_word_that_is_no_kind_is_refused(capsys):
    assert run_app(["list", "method"]) == 2
    assert "did you mean 'methods'?" in capsys.readouterr().err


def test_plugins_of_a_study_are_listed(capsys, tmp_path):
    study = tmp_path / "study.toml"
    study.write_text(
        f"plugins = ['{EVERYTHING}']\n[data]\nsource = 'squares'\n[sites]\npartition = 'in-turn'\ncount = 2\n"
        "[method]\nname = 'fed-prototypes'\n[policy]\nkinds = ['weights', 'metrics', 'prototypes']\n"
    )
    for kind in KINDS:
        added = [row for row in listed(capsys, kind, "--study", str(study)).values() if row["from"] != "polyclinic"]
        assert [row["from"] for row in added] == [f"plug-in {EVERYTHING}"]
        assert added[0]["summary"]


def test_a_broken_package_is_listed_with_the_reason(capsys, tmp_path, monkeypatch):
    install(tmp_path / "packages", "broken", {"polyclinic.methods": "broken = no_such_module:X"})
    monkeypatch.syspath_prepend(tmp_path / "packages")
    row = listed(capsys, "methods")["broken"]
    assert row["from"] == "broken 0.1"
    assert "cannot be imported: ModuleNotFoundError" in row["summary"]
