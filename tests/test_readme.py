"""README's own study and its commands, typed as README has them, in a folder with images and nothing else."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from polyclinic.cli import run_app
from polyclinic.data.datasets.phantoms.chest import ChestPhantom

TEXT = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
SECTION = TEXT.partition("\n## A study\n")[2].partition("\n## ")[0]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", SECTION, re.DOTALL)


def draw_images(folder: Path) -> None:
    """`scans` with a folder per class, and `new_scans`, as PNG files."""
    data = ChestPhantom(samples=200, size=64).load()
    for number, (image, label) in enumerate(zip(data.images, data.labels, strict=True)):
        place = folder / ("new_scans" if number >= 196 else f"scans/{data.classes[label]}")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.asarray(image[0])).save(place / f"{number}.png")


@pytest.mark.slow  # a ResNet-18 is trained six times, and attacked
@pytest.mark.timeout(1800)
def test_what_readme_says_works_in_this_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    draw_images(tmp_path)
    (study,), (commands,), (code,) = blocks("toml"), blocks("bash"), blocks("python")
    for long, short in (("rounds = 20\n", "rounds = 1\n"), ("size = 64\n", "size = 32\n")):  # else as it is written
        assert long in study
        study = study.replace(long, short)
    Path("study.toml").write_text(study)
    typed = [shlex.split(line, comments=True)[1:] for line in commands.splitlines()]
    assert [words[0] for words in typed] == ["run", "ledger", "audit", "compare", "report", "predict"]
    for words in typed:
        capsys.readouterr()
        assert run_app(words) == 0, (words, capsys.readouterr().err)
    assert len([line for line in capsys.readouterr().out.splitlines() if "new_scans" in line]) == 4
    verdicts = json.loads(Path("runs/first/audit.json").read_text())["verdicts"]
    assert verdicts["weights"]["verdict"] in ("leaks", "withstood", "not tested")
    assert list(Path("runs/first").rglob("*.png"))  # "with pictures"
    assert "<html" in Path("runs/first/report.html").read_text(encoding="utf-8")
    compared = json.loads(Path("runs/compared/comparison.json").read_text())["methods"]
    assert set(compared) == {"standalone", "fedavg", "cwt", "centralized"}
    exec(code, {})
    assert Path("runs/from-python/result.json").exists()
    first, again = (json.loads(Path(f"runs/{name}/result.json").read_text()) for name in ("first", "from-python"))
    assert first["weights_sha256"] == again["weights_sha256"]  # "the same model, bit for bit"
    assert run_app(shlex.split(re.search(r"`polyclinic (run --resume [^`]+)`", SECTION)[1])) == 0


def test_the_commands_of_make_are_targets_of_the_makefile():
    makefile = (Path(__file__).parents[1] / "Makefile").read_text(encoding="utf-8")
    typed = re.findall(r"\bmake ([a-z-]+)", TEXT)
    assert {"demo", "test", "docs"} <= set(typed)
    assert [name for name in typed if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []
