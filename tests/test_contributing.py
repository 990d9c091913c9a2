"""CONTRIBUTING, followed to the letter inside a copy of the repository."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "polyclinic"
#: alone, with two workers, stopped and resumed, audited, predicted with
PROGRAM = """
import json, sys
from pathlib import Path
import numpy as np
from PIL import Image
import polyclinic
from polyclinic.runner.run.recorder import Display

class Stop(Display):
    def round_done(self, line, rounds):
        raise KeyboardInterrupt

def result(name):
    return json.loads(Path(name, "result.json").read_text())["weights_sha256"]

def main(source):
    study = polyclinic.load_study("study.toml")
    assert Path(polyclinic.__file__).is_relative_to(source), polyclinic.__file__
    study.with_settings({"privacy.noise_multiplier": 1.0})  # can be trained with differential privacy
    polyclinic.run(study, "alone")
    two = study.with_settings({"engine.workers": 2})
    try:
        polyclinic.run(two, "two", display=Stop())
    except KeyboardInterrupt:
        pass
    polyclinic.run(study, "two", resume=True)  # in this process: to start workers again takes seconds
    assert result("alone") == result("two")
    assert json.loads(Path("two", "result.json").read_text())["failures"] == []
    assert polyclinic.audit("two")["complete"]
    Image.fromarray(np.zeros((28, 28, 3), np.uint8)).save("black.png")
    print(polyclinic.predict("two", ["black.png"])[0].values["class"])

if __name__ == "__main__":
    main(sys.argv[1])
"""
STUDY = """
data = {{ source = "fundus-phantom", samples = 60, size = 28 }}
sites = {{ partition = "iid", count = 2 }}
model = {{ backbone = "lenet5" }}
optimizer = {{ batch_size = 8 }}
method = {{ name = "{method}", rounds = 2 }}
engine = {{ device = "cpu", workers = 1 }}
[audit]  # that an audit runs to its end is asked, not what it finds
keep_parcels = 0
gradient_inversion = {{ optimizer = "adam", iterations = 3, label = "joint" }}
"""


def python_block(page: Path) -> str:
    """The first one of a page: a method."""
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)[0]


def follow(folder: Path, source: Path, method: str) -> None:
    (folder / "study.toml").write_text(STUDY.format(method=method))
    (folder / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "program.py", str(source)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("healthy", "diseased")


@pytest.mark.slow
def test_inside_the_repository(tmp_path):
    """The file that CONTRIBUTING shows, and one line."""
    copy = tmp_path / "src" / "polyclinic"
    shutil.copytree(SOURCE, copy)  # with what is compiled already
    imports = (copy / "methods" / "cwt.py").read_text().partition("class ")[0]
    (copy / "methods" / "taking_turns.py").write_text(imports + python_block(ROOT / "CONTRIBUTING.md"))
    registry = copy / "methods" / "__init__.py"
    line = 'METHODS: Registry[type[Method]] = Registry(\n    "polyclinic.methods",\n    {\n'
    text = registry.read_text()
    assert line in text
    added = text.replace(line, line + '        "taking-turns": TakingTurns,\n')
    registry.write_text(
        added.replace("\nMETHODS", "\nfrom polyclinic.methods.taking_turns import TakingTurns\n\nMETHODS", 1)
    )
    follow(tmp_path, tmp_path / "src", "taking-turns")


def test_every_folder_is_in_the_table():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    folders = [path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()]
    assert [name for name in folders if f"`{name}/`" not in text] == []
    assert [name for name in re.findall(r"^\| `(\w+)/`", text, re.MULTILINE) if not (SOURCE / name).is_dir()] == []
