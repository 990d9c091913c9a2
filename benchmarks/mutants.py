"""Mutants: small changes of the core rooms, and whether the tests of the same room notice.

    python benchmarks/mutants.py [--quick] [--minutes N] [--workers N] [--seed S] [--rooms a,b] [--json FILE]

Each mutant negates a comparison, changes a number, swaps + and -, and and or, or drops a guard, in a copy of the tree.
The tests of the file's own name run first, then those of its folder and room, until one fails. A mutant that lives is
listed with its line; some change nothing that a result depends on, and somebody must look. One whose tests did not end
in time is counted as neither.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from parallel import in_parallel

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("federation", "methods", "privacy", "attacks", "generators", "tasks", "data")
#: seconds that the tests of one mutant may take
LONGEST = 150
#: pytest's exit code where no test was chosen
NOTHING_COLLECTED = 5

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


def tests_of(file: Path, tests: Path) -> tuple[list[Path], ...]:
    """The test files of a source file: those of its own name, then those of its folder and of the room."""
    place = file.relative_to(ROOT / "src" / "polyclinic")
    own = sorted(tests.rglob(f"test_{file.stem}*.py"))
    folder = sorted((tests / place.parent).glob("test_*.py"))
    room = sorted((tests / place.parts[0]).rglob("test_*.py"))
    return own, [path for path in dict.fromkeys([*folder, *room]) if path not in own]


class Mutants:
    """A copy of the tree, one of whose files is changed at a time."""

    def __init__(self, copy: Path, seed: int, rooms: tuple[str, ...]) -> None:
        self.copy, self.draw = copy, random.Random(seed)
        self.broken: list[str] = []  # tests that fail without any change, on this machine
        for name in ("src", "tests", "benchmarks", "examples", "docs"):
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        self.files = [file for room in rooms for file in sorted((ROOT / "src" / "polyclinic" / room).rglob("*.py"))]
        self.sizes = [file.stat().st_size for file in self.files]

    def one(self, until: float) -> dict[str, object] | None:
        """Draw a mutant and run its tests until a moment; None for a file without a place to change."""
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
        killed = self._is_killed(file, until)
        shutil.copy(file, changed)
        where = f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        room = file.relative_to(ROOT / "src" / "polyclinic").parts[0]
        return {"room": room, "where": where, "how": how, "before": before, "killed": killed}

    def _is_killed(self, file: Path, until: float) -> bool | None:
        """Whether a test fails that does not fail without the change; None if they did not end in time."""
        ends = min(until, time.monotonic() + LONGEST)
        for chosen in tests_of(file, self.copy / "tests"):
            while chosen:
                code, failed = self._tested(chosen, ends)
                if code is None:
                    return None
                if code == 0 or not failed:
                    break
                if self._fails_without(file, failed, ends) is False:
                    return True
                self.broken.append(failed)  # it fails here anyhow: the next one is asked
        return False

    def _fails_without(self, file: Path, test: str, ends: float) -> bool | None:
        """Whether a test, or a file that cannot be collected, fails with the file as it is."""
        changed = self.copy / file.relative_to(ROOT)
        mutant = changed.read_bytes()
        shutil.copy(file, changed)
        code, _ = self._tested([test], ends, leave_out=False)
        changed.write_bytes(mutant)
        return None if code is None else code != 0

    def _tested(self, chosen: Sequence[Path | str], ends: float, *, leave_out: bool = True) -> tuple[int | None, str]:
        """The exit code of the tests (0 where none was collected, None where they did not end), and what failed."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(self._paths()), "OMP_NUM_THREADS": "1"}
        options = ["-x", "-q", "-rfE", "--tb=no", "-m", "not slow", "-p", "no:cacheprovider"]
        for test in self.broken if leave_out else ():
            options += ["--deselect", test] if "::" in test else ["--ignore", test]
        with tempfile.TemporaryFile() as printed:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *map(str, chosen)],
                cwd=self.copy,
                env=environment,
                stdout=printed,
                stderr=printed,
                start_new_session=True,  # so that what a test started ends with it
            )
            try:
                code = process.wait(max(1.0, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            printed.seek(0)
            found = re.search(r"^(?:FAILED|ERROR) (\S+)", printed.read().decode(errors="replace"), re.MULTILINE)
        return (0 if code == NOTHING_COLLECTED else code), found[1] if found else ""

    def _paths(self) -> list[str]:
        """Where Python looks for modules: the copy first."""
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        return [str(self.copy / "src"), *(path for path in given if path and not path.rstrip("/").endswith("src"))]


def counted(found: list[dict], seed: int, rooms: list[str]) -> dict[str, Any]:
    """Killed and tried in each room, and those that live or were not judged."""
    counts = {}
    for room in rooms:
        judged = [one["killed"] for one in found if one["room"] == room and one["killed"] is not None]
        if judged:
            counts[room] = {"tried": len(judged), "killed": sum(judged)}
    alive = [one for one in found if one["killed"] is False]
    unjudged = [one for one in found if one["killed"] is None]
    return {"seed": seed, "rooms": counts, "alive": alive, "not_judged": unjudged}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two mutants")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", default=",".join(ROOMS))
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    started, rooms = time.monotonic(), chosen.rooms.split(",")
    until = started + 60 * chosen.minutes

    def write(found: list[Any]) -> dict[str, Any]:
        result = counted(found, chosen.seed, rooms)
        if chosen.json:
            chosen.json.write_text(json.dumps(result, indent=1) + "\n")
        return result

    with tempfile.TemporaryDirectory() as place:

        def work(number: int, tell: Callable[[Any], None]) -> None:
            mutants = Mutants(Path(place) / str(number), chosen.seed * 1009 + number, tuple(rooms))
            done = 0
            while time.monotonic() < until and not (chosen.quick and done >= 2):
                if (mutant := mutants.one(until)) is not None:
                    done += 1
                    tell(mutant)

        told, crashed = in_parallel(work, chosen.workers, Path(place), until, lambda found: write(found) and None)
    result = write(told)
    short = {name: len(result[name]) for name in ("alive", "not_judged")}
    print(json.dumps(result | short | {"crashed": crashed}))


if __name__ == "__main__":
    main()
