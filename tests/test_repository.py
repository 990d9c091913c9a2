"""The repository stands alone: nothing in it names a folder outside it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
WHERE = ("src", "tests", "docs", "examples", "benchmarks", "lab", "*.md", "*.toml", "Makefile")
SUFFIXES = {".py", ".md", ".toml", ".json", ".jsonl", ".txt", ""}
#: folders of one machine, and relative paths in settings that leave the repository
OUTSIDE = re.compile(
    r"""(?<![\w.~])/(?:work|root|home/\w+|Users/\w+|mnt/\w+)/|\.\./shared|^path = "\.\./""", re.MULTILINE
)


def texts() -> list[Path]:
    found = [path for pattern in WHERE for path in ROOT.glob(pattern)]
    files = [file for path in found for file in (path.rglob("*") if path.is_dir() else [path])]
    return [file for file in files if file.is_file() and file.suffix in SUFFIXES and "__pycache__" not in file.parts]


def test_nothing_names_a_folder_outside_the_repository():
    files = [file for file in texts() if file != Path(__file__)]
    assert len(files) > 300
    named = {
        str(file.relative_to(ROOT)): match[0]
        for file in files
        if (match := OUTSIDE.search(file.read_text(encoding="utf-8")))
    }
    assert named == {}


def test_the_search_finds_what_it_looks_for():
    assert OUTSIDE.search('[data]\npath = "../images.npz"')
    assert OUTSIDE.search("see ../shared/data")
    assert OUTSIDE.search("kept in /home/anna/images")
    assert not OUTSIDE.search("see [data](../docs/data.md), https://example.org/home/x and ~/images")
