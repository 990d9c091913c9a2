"""The Python examples of the guide to studies run as they are written; its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import polyclinic
from polyclinic.federation.ledger.kinds import KINDS
from polyclinic.methods import METHODS
from polyclinic.registry import GROUPS, registry_of

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
LONGEST_LINE = 100


def test_the_python_examples_of_studies_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "study.md").read_text(), re.DOTALL)
    names: dict = {}
    exec("\n".join(blocks), names)
    assert "metrics" in names["schema"]["required"]
    assert 0 <= names["result"].metrics["per_site"]["site-1"]["accuracy"] <= 1
    assert names["longer"].method.rounds == 2
    assert (tmp_path / "runs" / "two-sites" / "result.json").exists()


def test_the_python_example_of_statistics_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "statistics.md").read_text(), re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out.startswith("0.875 [")


def test_the_plugins_of_extend_md_run_together(tmp_path):
    """Every block is a whole plug-in file: one study takes a source, a partition, ... from each of them."""
    codes = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extend.md").read_text(), re.DOTALL)
    files = [tmp_path / f"plugin_{number}.py" for number in range(len(codes))]
    for file, code in zip(files, codes, strict=True):
        file.write_text(code)
    study = polyclinic.Study(
        plugins=[str(file) for file in files],
        data={"source": "squares", "size": 28, "samples": 60},
        sites={"partition": "in-turn", "count": 2},
        task={"name": "focal", "gamma": 1.0},
        model={"backbone": "two-layers"},
        method={"name": "fed-counts", "rounds": 1},
        generator={"name": "class-means"},
        audit={"keep_parcels": 1},
        policy={"kinds": [*KINDS.builtin, "class-counts"]},
        engine={"workers": 1, "device": "cpu"},
    )
    assert {table for code in codes for table in re.findall(r"^([A-Z]+) = {", code, re.MULTILINE)} == set(GROUPS)
    run = polyclinic.run(study, tmp_path / "run")
    report = polyclinic.audit(run.folder, kinds=["class-counts"])
    assert [one["findings"][0]["attack"] for one in report["parcels"]] == ["reads-counts"]
    assert report["verdicts"]["class-counts"]["verdict"] == "leaks"

    replay = study.with_settings({"method": {"name": "fedavg-replay", "rounds": 1}, "replay.codes": "prior"})
    assert polyclinic.run(replay, tmp_path / "replay")["communication"]["by_kind"]["generator"] > 0
    features = registry_of("encoders")["channel-means"]().features(torch.full((2, 1, 28, 28), 255, dtype=torch.uint8))
    assert features.tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_index_leads_to_every_page():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages <= set(re.findall(r"\]\(([\w.]+\.md)[)#]", index))


def test_no_part_of_the_index_lists_a_page_twice():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for part in index.split("\n## ")[2:]:  # the ways through, before them, may meet
        listed = re.findall(r"^- \[[^]]+\]\(([^)#]+)", part, flags=re.M)
        assert len(listed) == len(set(listed)), sorted(name for name in listed if listed.count(name) > 1)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_of_prose_are_short(page):
    """Long lines are for tables, code and a link that cannot be broken."""
    text = re.sub(r"^ *```.*?^ *```", lambda block: "\n" * block[0].count("\n"), page.read_text(), flags=re.M | re.S)
    for number, line in enumerate(text.splitlines(), 1):
        breakable = " " in line.strip() and not line.lstrip().startswith("|")
        assert len(line) <= LONGEST_LINE or not breakable, f"{page.name}:{number} has {len(line)} characters: {line}"


def test_the_navigation_of_the_site_names_pages_that_are_there():
    """Pages of the reference are made when the site is built, and some lie outside docs/."""
    named = re.findall(r"^ +- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    written = [page for page in named if not page.startswith(("project/", "reference/"))]
    assert len(written) > 40
    assert [page for page in written if not (ROOT / "docs" / page).exists()] == []


SECTIONS = ("What it does", "What leaves a site", "When to choose it", "Settings")


@pytest.mark.parametrize("name", list(METHODS.builtin))
def test_every_method_has_a_page(name):
    """One page for one method, or for those that differ in a sentence."""
    pages = {page: page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md")}
    parts = [f'`method.name = "{name}"`', f"<!-- what leaves: {name} -->", f"<!-- settings: {name} -->"]
    found = [page for page, text in pages.items() if all(text.count(part) == 1 for part in parts)]
    assert len(found) == 1, f"write docs/methods/{name}.md, as the pages beside it are"
    assert tuple(re.findall(r"^## (.+)$", pages[found[0]], re.MULTILINE)) == SECTIONS


def test_the_tutorials_plugin_runs(tmp_path, monkeypatch):
    """The method of the tutorial equals FedAvg with one site, as the tutorial says."""
    text = (ROOT / "docs" / "tutorials" / "add_method.md").read_text(encoding="utf-8")
    code, check = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (settings,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "median.py").write_text(code)
    (tmp_path / "test_median.py").write_text(check)
    (tmp_path / "study.toml").write_text(settings)
    monkeypatch.chdir(tmp_path)
    one = ["sites.count=1", "data.samples=80", "method.rounds=1", "engine.device=cpu", "engine.workers=1"]
    ours = polyclinic.run(polyclinic.load_study(Path("study.toml"), one), "ours")
    fedavg = polyclinic.run(polyclinic.load_study(Path("study.toml"), [*one, "method.name=fedavg"]), "fedavg")
    assert ours["weights_sha256"] == fedavg["weights_sha256"]
    several = [*one, "sites.count=3"]
    assert polyclinic.run(polyclinic.load_study(Path("study.toml"), several), "three")["method"] == "fed-median"
    subprocess.run([sys.executable, "-m", "pytest", "-q", "test_median.py"], check=True)


@pytest.mark.parametrize("page", ["tutorials/first_study.md", "tutorials/three_hospitals.md", "../README.md"])
def test_studies_on_pages_are_studies(page, tmp_path):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    study = next(block for block in re.findall(r"```toml\n(.*?)```", text, re.DOTALL) if "[method]" in block)
    (tmp_path / "study.toml").write_text(study)
    assert polyclinic.load_study(tmp_path / "study.toml").method.name == "fedavg"
