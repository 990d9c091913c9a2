"""Mutants: small changes of the core rooms, and whether the tests of the same room notice.

    python benchmarks/mutants.py [--quick] [--minutes N] [--seed S] [--rooms a,b] [--json FILE]

Each mutant negates a comparison, changes a number, swaps + and -, and and or, or drops a guard, in a copy of the tree.
The tests of the file's own name run first, then those of its folder, until one fails. A mutant that lives is listed
with its line; some change nothing that a result depends on, and somebody must look.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("federation", "methods", "privacy", "attacks", "generators", "tasks", "data")
#: seconds that the tests of one mutant may take: a mutant that hangs is noticed, too
LONGEST = 300

SWAPPED: dict[type, type] = {
    **{ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.And: ast.Or, ast.Or: ast.And},
}


def mutations(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """The places of a file that can be changed, and how."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
            yield node, "negated comparison"
        elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPPED:
            yield node, "other operator"
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            yield node, "other number"
        elif isinstance(node, ast.If) and len(node.body) == 1 and isinstance(node.body[0], ast.Raise | ast.Return):
            yield node, "dropped guard"


def mutate(node: ast.AST, how: str) -> None:
    if isinstance(node, ast.Compare):
        node.ops[0] = SWAPPED[type(node.ops[0])]()
    elif isinstance(node, ast.BinOp | ast.BoolOp):
        node.op = SWAPPED[type(node.op)]()
    elif isinstance(node, ast.Constant):
        node.value = node.value + 1 if isinstance(node.value, int) else node.value * 2 + 0.5
    elif isinstance(node, ast.If):
        node.test = ast.Constant(False)


def tests_of(file: Path, tests: Path) -> list[Path]:
    """The test files of a source file: those of its own name first, then those of its folder and of the room."""
    place = file.relative_to(ROOT / "src" / "polyclinic")
    own = sorted(tests.rglob(f"test_{file.stem}*.py"))
    folder = sorted((tests / place.parent).glob("test_*.py"))
    room = sorted((tests / place.parts[0]).rglob("test_*.py"))
    return list(dict.fromkeys([*own, *folder, *room]))


class Mutants:
    """A copy of the tree, one of whose files is changed at a time."""

    def __init__(self, copy: Path, seed: int, rooms: tuple[str, ...]) -> None:
        self.copy, self.draw = copy, random.Random(seed)
        for name in ("src", "tests", "benchmarks", "examples", "docs"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        self.files = [file for room in rooms for file in sorted((ROOT / "src" / "polyclinic" / room).rglob("*.py"))]
        self.sizes = [file.stat().st_size for file in self.files]

    def one(self) -> dict[str, object] | None:
        """Draw a mutant and run its tests; None for a file without a place to change."""
        [file] = self.draw.choices(self.files, self.sizes)
        tree = ast.parse(file.read_text(encoding="utf-8"))
        places = list(mutations(tree))
        if not places:
            return None
        node, how = self.draw.choice(places)
        before = ast.unparse(node).splitlines()[0]
        mutate(node, how)
        changed = self.copy / file.relative_to(ROOT)
        changed.write_text(ast.unparse(tree), encoding="utf-8")
        killed = self._is_killed(file)
        shutil.copy(file, changed)
        where = f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        room = file.relative_to(ROOT / "src" / "polyclinic").parts[0]
        return {"room": room, "where": where, "how": how, "before": before, "killed": killed}

    def _is_killed(self, file: Path) -> bool:
        chosen = tests_of(file, self.copy / "tests")
        environment = {**os.environ, "PYTHONPATH": str(self.copy / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *chosen]
        try:
            done = subprocess.run(
                [str(part) for part in command],
                cwd=self.copy,
                env=environment,
                timeout=LONGEST,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return True
        return done.returncode != 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two mutants")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", default=",".join(ROOMS))
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    started, found = time.monotonic(), []
    with tempfile.TemporaryDirectory() as copy:
        mutants = Mutants(Path(copy), chosen.seed, tuple(chosen.rooms.split(",")))
        while time.monotonic() - started < 60 * chosen.minutes and not (chosen.quick and len(found) >= 2):
            if (mutant := mutants.one()) is not None:
                found.append(mutant)
                print(json.dumps(mutant), flush=True)
    rooms = {room: [one["killed"] for one in found if one["room"] == room] for room in chosen.rooms.split(",")}
    counts = {
        room: {"tried": len(killed), "killed": sum(map(bool, killed))} for room, killed in rooms.items() if killed
    }
    alive = [one for one in found if not one["killed"]]
    if chosen.json:
        chosen.json.write_text(json.dumps({"seed": chosen.seed, "rooms": counts, "alive": alive}, indent=1) + "\n")
    print(json.dumps({"seed": chosen.seed, "rooms": counts, "alive": len(alive)}))


if __name__ == "__main__":
    main()
