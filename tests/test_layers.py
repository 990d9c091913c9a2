"""Imports point downwards only: `[tool.polyclinic] layers` in pyproject.toml is the list, top layer first.

Imports inside functions and under TYPE_CHECKING count as well: a hidden cycle is a cycle.
"""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "polyclinic"
#: the public API imports from everywhere; the version is a constant of it
EVERYWHERE = {"__init__", "__main__"}


@cache
def layers() -> dict[str, int]:
    """The place of each room, 0 at the top."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return {room: place for place, row in enumerate(table["tool"]["polyclinic"]["layers"]) for room in row}


def imported(tree: ast.AST) -> Iterator[str]:
    """The dotted names of our own modules that a file imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "polyclinic")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            if node.module == "polyclinic":
                yield from (f"polyclinic.{alias.name}" for alias in node.names)
            elif (node.module or "").startswith("polyclinic."):
                yield str(node.module)


def upward(source: str, room: str) -> list[str]:
    """The imports of a file of `room` that do not point downwards."""
    place = layers()
    found = []
    for name in imported(ast.parse(source)):
        target = name.split(".")[1] if "." in name else "__init__"
        if target != room and target != "__version__" and place.get(target, -1) <= place[room]:
            found.append(name)
    return found


@cache
def files() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0][:-3] not in EVERYWHERE]


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("room", sorted({room_of(path) for path in files()}))
def test_imports_point_downwards(room):
    assert room in layers(), f"pyproject.toml, [tool.polyclinic] layers: '{room}' is in no layer"
    found = {path: upward(path.read_text(encoding="utf-8"), room) for path in files() if room_of(path) == room}
    assert {str(path.relative_to(PACKAGE)): names for path, names in found.items() if names} == {}


@pytest.mark.parametrize("source", [
    "from polyclinic.methods import METHODS",
    "import polyclinic.cli.app",
    "def f():\n    from polyclinic.runner.run.run import run",
    "if TYPE_CHECKING:\n    from polyclinic.study import Study",
    "from polyclinic import run",
])  # fmt: skip
def test_an_upward_import_is_found(source):
    assert upward(source, "data")


def test_every_layer_has_its_room():
    rooms = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in files()}
    assert set(layers()) == rooms


def test_no_two_test_files_have_one_name():
    """pytest refuses the second: without packages among the tests, a file's name is its module's name."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []
