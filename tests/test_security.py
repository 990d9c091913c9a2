"""docs/security.md names a test for each defence: the tests must exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
#: rows of the tables of defences: what is tried, what holds, tests
DEFENCES = [
    line
    for table in re.findall(r"\| attack \| what holds \| test \|\n\|---\|---\|---\|\n((?:\|.*\n)+)", PAGE)
    for line in table.splitlines()
]
NAMED = sorted(set(re.findall(r"`(tests/[\w/.:]+)`", PAGE)))


@pytest.mark.parametrize("named", NAMED)
def test_a_test_that_is_named_exists(named):
    file, _, function = named.partition("::")
    assert (f"\ndef {function}(" if function else "\ndef test_") in (ROOT / file).read_text(encoding="utf-8")


def test_each_defence_names_a_test():
    assert len(DEFENCES) > 30
    assert [line for line in DEFENCES if "`tests/" not in line.split("|")[3]] == []


def test_every_file_of_attacks_is_named():
    """What tests/adversary tries is a defence that this page owes its reader."""
    files = {path.name for path in (ROOT / "tests" / "adversary").glob("test_*.py")}
    assert sorted(files - {Path(name.partition("::")[0]).name for name in NAMED}) == []


def test_security_md_says_how_to_report_and_leads_to_the_page():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert "## Report a weakness" in text
    assert "(docs/security.md)" in text


def test_each_actor_has_a_section_with_what_is_not_defended():
    actors = re.findall(r"^\| ([\w' -]+) \|", PAGE.split("## The coordinator")[0], re.MULTILINE)[1:]
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)[2:]
    assert [section.splitlines()[0].lower() for section in sections] == actors
    assert all("**Not defended.**" in section for section in sections)
