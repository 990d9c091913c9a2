"""`polyclinic bench` measures real work, in a small size here, and says how to measure it again."""

import json

import pytest

from polyclinic.cli import run_app
from polyclinic.runner import bench


@pytest.fixture
def small(monkeypatch):
    for name, value in {"SITES": 2, "STEPS": 1, "BATCH": 4, "SIDE": 32}.items():
        monkeypatch.setattr(bench, name, value)


def test_parts_are_measured_and_written_as_json(small, capsys, tmp_path):
    code = run_app(["bench", "--only", "overhead", "--only", "generators", "--json", "--out", str(tmp_path / "b.json")])
    printed = json.loads(capsys.readouterr().out)
    assert code == 0
    assert printed == json.loads((tmp_path / "b.json").read_text())
    assert [row["name"] for row in printed["rows"]] == [
        "overhead",
        "overhead, ratio",
        "generators, dcgan",
        "generators, vqvae2",
    ]
    assert all(row["value"] > 0 for row in printed["rows"])
    assert printed["rows"][1]["command"] == "polyclinic bench --only overhead"


def test_an_unknown_part_is_refused(capsys):
    assert run_app(["bench", "--only", "speed"]) == 2
    assert "--only: there is no part 'speed'; choose from overhead, engines" in capsys.readouterr().err


def test_the_first_time_does_not_count(monkeypatch):
    clock = iter([0.0, 50.0, 100.0, 103.0, 200.0, 201.0, 300.0, 302.0])
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock))
    assert bench.timed(lambda: None, repeats=3, device="cpu") == 2.0
