"""The Python examples of the guide to studies run as they are written; its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_python_examples_of_studies_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "study.md").read_text(), re.DOTALL)
    names: dict = {}
    exec("\n".join(blocks), names)
    assert "metrics" in names["schema"]["required"]
    assert 0 <= names["result"].metrics["per_site"]["site-1"]["accuracy"] <= 1
    assert names["longer"].method.rounds == 2
    assert (tmp_path / "runs" / "two-sites" / "result.json").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_index_leads_to_every_page():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages <= set(re.findall(r"\]\(([\w.]+\.md)[)#]", index))
