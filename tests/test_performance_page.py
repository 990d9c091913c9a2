"""docs/performance.md has the figures that benchmarks wrote, and no others."""

import json
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FIRST = ("gpu_round", "overhead", "attacks")


@pytest.fixture
def program(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    return runpy.run_path(str(ROOT / "benchmarks" / "performance_page.py"))


def test_the_page_is_what_the_figures_say(program):
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert page == program["page"](), "run python benchmarks/performance_page.py"


def test_every_kept_file_says_where_it_comes_from_and_has_a_section(program):
    kept = sorted((ROOT / "benchmarks" / "figures").glob("*.json"))
    assert kept
    for file in kept:
        content = json.loads(file.read_text(encoding="utf-8"))
        if "figures" not in content:  # of another page
            continue
        assert file.stem in program["SECTIONS"]
        assert content["command"].startswith(f"python benchmarks/{content['figures']['benchmark']}.py")
        assert all(content[name] not in ("", "unknown") for name in ("machine", "date", "commit"))


def test_the_picture_shows_what_stands_in_the_sections(program, tmp_path):
    """By hand from the kept files: two ratios to a bare loop, and one of an attack."""
    rows = program["glance"]()
    kept = {name: json.loads((ROOT / f"benchmarks/figures/{name}.json").read_text())["figures"] for name in FIRST}
    times = {row.what: row.times for row in rows}
    small = kept["gpu_round"]["cases"][0]
    assert times[f"a round: {small['case']}"] == 1 / small["ways"]["by reference"]["ratio"]
    assert times["a round: small CNN"] == 1 / kept["overhead"]["cases"][0]["cpu_ratio"]["median"]
    assert times["gradient inversion: ResNet-18 + AdamW"] == kept["attacks"]["rows"][1]["ratio"]
    program["performance_glance"].draw(rows, tmp_path / "glance.png")
    assert (tmp_path / "glance.png").read_bytes().startswith(b"\x89PNG")


def test_the_plan_is_what_the_figures_say(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    plan = runpy.run_path(str(ROOT / "benchmarks" / "plan.py"))
    text = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    assert text == plan["page"](plan["Plan"]()), "run python benchmarks/plan.py"


def test_a_plan_by_hand(monkeypatch):
    """1 GB up at 8 Mbit/s is 1,000 s; an hour of a GPU at 3 dollars, a gigabyte at 0.5, two hospitals: 7 dollars."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    plan = runpy.run_path(str(ROOT / "benchmarks" / "plan.py"))
    chosen = plan["Plan"](hospitals=2, link=8.0, gpu_hour=3.0, gigabyte=0.5)
    row = plan["row"](plan["Job"]("x", up=1e9, down=0, gpu=3600), chosen)
    assert row == ["x", "1.0 GB", "0.0 B", "1.0 h of a GPU", "1.3", "7"]
