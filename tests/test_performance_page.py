"""docs/performance.md has the figures that benchmarks wrote, and no others."""

import json
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAM = runpy.run_path(str(ROOT / "benchmarks" / "performance_page.py"))


def test_the_page_is_what_the_figures_say():
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert page == PROGRAM["page"](), "run python benchmarks/performance_page.py"


def test_every_kept_file_says_where_it_comes_from_and_has_a_section():
    kept = sorted((ROOT / "benchmarks" / "figures").glob("*.json"))
    assert kept
    for file in kept:
        content = json.loads(file.read_text(encoding="utf-8"))
        assert file.stem in PROGRAM["SECTIONS"]
        assert content["command"].startswith(f"python benchmarks/{content['figures']['benchmark']}.py")
        assert all(content[name] not in ("", "unknown") for name in ("machine", "date", "commit"))
