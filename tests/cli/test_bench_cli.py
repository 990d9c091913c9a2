"""`polyclinic bench` measures real work, in a small size here, and says how to measure it again."""

import json

import pytest

from polyclinic.cli import run_app
from polyclinic.errors import BadInput
from polyclinic.runner.compare import bench


@pytest.fixture
def small(monkeypatch):
    for name, value in {"SITES": 2, "STEPS": 1, "BATCH": 4, "SIDE": 32}.items():
        monkeypatch.setattr(bench, name, value)


def test_parts_are_measured_and_written_as_json(small, capsys, tmp_path):
    code = run_app(["bench", "--only", "overhead", "--only", "generators", "--json", "--out", str(tmp_path / "b.json")])
    printed = json.loads(capsys.readouterr().out)
    assert code == 0
    assert printed == json.loads((tmp_path / "b.json").read_text())
    names = ["overhead", "overhead, ratio", "generators, dcgan", "generators, vqvae2"]
    assert [row["name"] for row in printed["rows"]] == names
    assert all(row["value"] > 0 for row in printed["rows"])
    assert printed["rows"][1]["command"] == "polyclinic bench --only overhead"


def test_an_unknown_part_is_refused(capsys):
    assert run_app(["bench", "--only", "speed"]) == 2
    assert "--only: there is no part 'speed'; choose from overhead, engines" in capsys.readouterr().err


def test_a_part_whose_package_is_missing_is_left_out_unless_it_was_asked_for(small, capsys, monkeypatch, tmp_path):
    def without_package(folder, device):
        raise BadInput("the package is missing")

    monkeypatch.setattr(bench, "PARTS", {"encoders": without_package, "overhead": bench.overhead})
    assert run_app(["bench", "--out", str(tmp_path / "b.json")]) == 0
    assert "encoders are left out: the package is missing" in capsys.readouterr().err
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["overhead", "overhead, ratio"]
    assert run_app(["bench", "--only", "encoders"]) == 2
