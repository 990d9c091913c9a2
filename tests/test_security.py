"""SECURITY.md and docs/security_table.md name a test for each defence: the tests must exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
#: rows of the tables of defences: what is tried, what holds, tests
DEFENCES = [
    line
    for table in re.findall(r"\| attack \| what holds \| test \|\n\|---\|---\|---\|\n((?:\|.*\n)+)", PAGE)
    for line in table.splitlines()
]
TABLE = (ROOT / "docs" / "security_table.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/.:]+)`", PAGE + TABLE)))


@pytest.mark.parametrize("named", NAMED)
def test_a_test_that_is_named_exists(named):
    file, _, function = named.partition("::")
    assert (f"\ndef {function}(" if function else "\ndef test_") in (ROOT / file).read_text(encoding="utf-8")


def test_each_defence_names_a_test():
    assert len(DEFENCES) > 30
    assert [line for line in DEFENCES if "`tests/" not in line.split("|")[3]] == []


def test_each_attack_of_the_table_says_what_it_got_and_names_a_test():
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.splitlines() if line.startswith("| ")
    ]
    attacks = [row for row in rows if row[0] != "attack"]
    assert len(attacks) > 25
    assert all(len(row) == 4 and all(row) and "`tests/" in row[3] for row in attacks)


def test_each_actor_has_a_section_with_what_is_not_defended():
    actors = re.findall(r"^\| ([\w' -]+) \|", PAGE.split("## The coordinator")[0], re.MULTILINE)[1:]
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)[2:]
    assert [section.splitlines()[0].lower() for section in sections] == actors
    assert all("**Not defended.**" in section for section in sections)
