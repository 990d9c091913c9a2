"""The procedures of docs/hospital_it.md, typed as the page has them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from kit_of_north import came, left, make_kit

from polyclinic.cli import run_app

PAGE = (Path(__file__).parents[2] / "docs" / "hospital_it.md").read_text(encoding="utf-8")


def commands_of(heading: str) -> list[str]:
    """The lines of all blocks of commands under a heading, without comments."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```bash\n(.*?)```", section, re.S)
    return [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]


def test_what_the_page_says_about_uninstalling_leaves_the_proof(tmp_path, capsys):
    kit = make_kit(tmp_path)
    came(kit)
    file = left(kit)
    line = next(line for line in commands_of("Uninstall") if line.startswith("polyclinic"))
    assert run_app([str(kit) if word.startswith("/var") else word for word in shlex.split(line)[1:]]) == 0
    assert file.exists()
    assert not list(kit.rglob("*.key"))
