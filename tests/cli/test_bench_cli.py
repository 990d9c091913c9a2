"""`polyclinic bench` measures real work, in a small size here."""

import json

from polyclinic.cli import run_app
from polyclinic.runner.compare import bench


def test_rounds_are_measured_and_written_as_json(monkeypatch, capsys, tmp_path):
    for name, value in {"SITES": 2, "STEPS": 1, "BATCH": 4, "SIDE": 32}.items():
        monkeypatch.setattr(bench, name, value)
    assert run_app(["bench", "--json", "--out", str(tmp_path / "b.json")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "b.json").read_text())
    names = ["overhead", "overhead, ratio", "engines", "engines, 2 workers"]
    assert [row["name"] for row in printed["rows"]] == names
    assert all(row["value"] > 0 for row in printed["rows"])
