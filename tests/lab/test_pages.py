"""lab/pages has the figures that benchmarks and campaigns wrote, and no others."""

import json
import runpy
from pathlib import Path

import pytest

LAB = Path(__file__).parents[2] / "lab"


@pytest.fixture(scope="module")
def program():
    return runpy.run_path(str(LAB / "benchmarks" / "performance_page.py"))


@pytest.mark.parametrize("page", ["performance", "campaigns"])
def test_a_page_is_what_the_figures_say(page, program):
    text = (LAB / "pages" / f"{page}.md").read_text(encoding="utf-8")
    assert text == program[page](), "run python lab/benchmarks/performance_page.py"


def test_every_section_has_a_file_that_says_where_it_comes_from(program):
    for name in (*program["SECTIONS"], *program["CAMPAIGNS"]):
        content = json.loads((LAB / "figures" / f"{name}.json").read_text(encoding="utf-8"))
        script = content["again"].split()[1]
        assert (LAB.parent / script).is_file()
        assert all(one["machine"] not in ("", "unknown") and one["date"] for one in content["measured"])


def test_the_picture_shows_what_stands_in_the_sections(program, tmp_path):
    """By hand from the kept files: two ratios to a bare loop, and one of an attack."""
    kept = {name: program["read"](name)["figures"] for name in program["SECTIONS"]}
    rows = program["glance"](kept)
    times = {row.what: row.times for row in rows}
    small = kept["gpu_round"]["cases"][0]
    assert times[f"a round: {small['case']}"] == 1 / small["ratio"]
    assert times["a round: small CNN"] == 1 / kept["overhead"]["cases"][0]["cpu_ratio"]["median"]
    assert times["gradient inversion: ResNet-18 + AdamW"] == kept["attacks"]["rows"][1]["ratio"]
    program["draw"](rows, tmp_path / "glance.png")
    assert (tmp_path / "glance.png").read_bytes().startswith(b"\x89PNG")
