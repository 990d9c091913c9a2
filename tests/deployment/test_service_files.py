"""The files of `deploy/` for a hospital's services: what systemd says of the units; their commands exist."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from polyclinic.cli import run_app

FOLDER = Path(__file__).parents[2] / "deploy"
UNITS = sorted((FOLDER / "systemd").glob("*.service"))


def command_of(unit: Path) -> list[str]:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read(unit)
    return shlex.split(parser["Service"]["ExecStart"])


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_the_command_of_a_unit_exists(unit, capsys):
    program, *words = command_of(unit)
    assert program.endswith("/bin/polyclinic")
    assert run_app([*words[:2], "--help"]) == 0


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_finds_nothing_wrong_with_a_unit(unit, tmp_path):
    program = command_of(unit)[0]
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace(program, shutil.which("true")))
    said = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60)
    about_it = [line for line in said.stderr.splitlines() if unit.name in line]
    assert about_it == []


def test_the_command_of_the_container_exists(capsys):
    text = (FOLDER / "Dockerfile").read_text()
    words = json.loads(re.search(r"^CMD (\[.*\])$", text, re.M)[1])
    assert run_app([*words[:2], "--help"]) == 0
