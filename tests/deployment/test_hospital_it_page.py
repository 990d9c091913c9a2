"""The procedures of docs/hospital_it.md, typed as the page has them: a new kit, logs that turn over, the end."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

from kit_of_north import came, left, make_kit

from polyclinic.cli import run_app

PAGE = (Path(__file__).parents[2] / "docs" / "hospital_it.md").read_text(encoding="utf-8")


def commands_of(heading: str) -> list[str]:
    """The lines of all blocks of commands under a heading, without comments."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```bash\n(.*?)```", section, re.S)
    return [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]


def test_a_new_kit_takes_over_what_left_and_the_budgets(tmp_path, capsys):
    """Renewing certificates, and adding a site later: the page has the same commands for both."""
    old, new = (make_kit(tmp_path / name) for name in ("old", "new"))
    came(old)
    assert run_app(["site", "approve", "first", "--kit", str(old)]) == 0
    (old / "local" / "splits.json").write_text("{}")
    left(old)
    (old / "anchors" / "runs").mkdir(parents=True, exist_ok=True)
    (new / "local" / "policy.toml").write_text("")
    typed = [line for line in commands_of("Renew certificates") if "deploy" not in line]
    assert len(typed) == 4
    for line in typed:
        line = re.sub(r"\bOLD\b", str(old), re.sub(r"\bNEW\b", str(new), line))
        if line.startswith("polyclinic"):
            capsys.readouterr()
            assert run_app(shlex.split(line)[1:]) == 0
        else:
            subprocess.run(["bash", "-ec", line], check=True, timeout=60)
    told = capsys.readouterr().out
    assert "bytes: 4,060 used of 1,000,000, 995,940 left (max_bytes)" in told
    assert not (new / "startup" / "client.key").exists()  # keys are not taken over


def test_what_the_page_says_about_uninstalling_leaves_the_proof(tmp_path, capsys):
    kit = make_kit(tmp_path)
    came(kit)
    file = left(kit)
    line = next(line for line in commands_of("Uninstall") if line.startswith("polyclinic"))
    assert run_app([str(kit) if word.startswith("/var") else word for word in shlex.split(line)[1:]]) == 0
    assert file.exists()
    assert not list(kit.rglob("*.key"))
