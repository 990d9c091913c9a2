"""`polyclinic start`: one command from images to a report; `run` writes a report at its end."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from polyclinic.cli import run_app, start


@pytest.fixture
def scans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Forty dark and forty bright images, a folder for each class."""
    rng = np.random.default_rng(0)
    for name, level in (("ill", 60), ("well", 140)):
        (tmp_path / "scans" / name).mkdir(parents=True)
        for number in range(40):
            pixels = rng.integers(level - 50, level + 50, (32, 32), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "scans" / name / f"{number}.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "scans"


def test_images_become_a_study_a_model_and_a_report(scans, capsys):
    assert run_app(["start", str(scans)]) == 0
    said = capsys.readouterr().out
    assert "runs/scans/study.toml: fine." in said
    assert "predict runs/scans/run" in said
    page = Path("runs/scans/run/report.html").read_text(encoding="utf-8")
    assert "<html" in page
    assert json.loads(Path("runs/scans/run/result.json").read_text())["metrics"]["test"]["accuracy"] > 0.5
    assert run_app(["start", str(scans)]) == 2
    assert "holds a run that has ended; see its report.html" in capsys.readouterr().err


def test_who_says_no_gets_the_study_and_goes_on_with_it_later(scans, tiny, monkeypatch, capsys):
    monkeypatch.setattr(start.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(start.typer, "confirm", lambda words, default: False)
    assert run_app(["start", str(scans), "--out", "mine"]) == 0
    assert sorted(path.name for path in Path("mine").iterdir()) == ["study.toml"]
    Path("mine/study.toml").write_text(tiny("fedavg", rounds=1).to_toml())
    assert run_app(["start", str(scans), "--out", "mine", "--yes"]) == 0
    assert json.loads(Path("mine/run/result.json").read_text())["method"] == "fedavg"


@pytest.mark.parametrize(("flags", "written"), [([], True), (["--no-report"], False), (["--quiet"], False)])
def test_a_run_writes_its_report_unless_told_not_to(tiny, tmp_path, flags, written):
    (tmp_path / "study.toml").write_text(tiny("fedavg", rounds=1).to_toml())
    assert run_app(["run", str(tmp_path / "study.toml"), "--out", str(tmp_path / "run"), *flags]) == 0
    assert (tmp_path / "run" / "report.html").exists() == written


def test_without_the_extra_a_run_ends_with_a_hint(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("polyclinic.extras.find_spec", lambda package: None)
    (tmp_path / "study.toml").write_text(tiny("fedavg", rounds=1).to_toml())
    assert run_app(["run", str(tmp_path / "study.toml"), "--out", str(tmp_path / "run")]) == 0
    assert "no report was written: it needs matplotlib, which is not installed" in capsys.readouterr().err
