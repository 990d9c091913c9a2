"""Mutants: small changes of the core rooms, and whether the tests of the same room notice.

    python benchmarks/mutants.py [--quick] [--minutes N] [--workers N] [--seed S] [--rooms a,b] [--calls FILE]
                                 [--json FILE]

Each mutant negates a comparison, changes a number, swaps + and -, and and or, or drops a guard, in a copy of the tree.
First the tests of the rooms run once as they are, to learn which functions each one calls (kept in `--calls`). A mutant
is judged by the tests of its room, and those of the file's own name, that call the changed function; the quickest come
first, then the other tests of the same files. A mutant that lives is listed with its line; some change nothing that a
result depends on, and somebody must look. One whose tests came to the end of the time is counted as neither.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import gzip
import json
import py_compile
import random
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mutants_children import run_tests, warm
from parallel import in_parallel

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("federation", "methods", "privacy", "attacks", "generators", "tasks", "data")
#: rooms of tests that try the guards of others
MORE_TESTS = {"federation": ("adversary",), "privacy": ("adversary",)}
#: processor seconds of tests that one mutant is given, and those of the first, quickest ones
LONGEST, FIRST = 100.0, 15.0
#: a mutant whose tests take so many times as long, and so many seconds more, does not end: its tests notice
ENDLESS = (8.0, 40.0)
#: seconds that all tests of one file may take while they are watched
LONGEST_FILE = 150.0

SWAPPED: dict[type, type] = {
    **{ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.And: ast.Or, ast.Or: ast.And},
}


def mutations(tree: ast.Module) -> Iterator[tuple[ast.AST, str, str]]:
    """The places of a file that can be changed, how, and the function they are in ("" where they run at import)."""
    for node, function in _with_functions(tree, "", ""):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
            yield node, "negated comparison", function
        elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPPED:
            yield node, "other operator", function
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            yield node, "other number", function
        elif isinstance(node, ast.If) and len(node.body) == 1 and isinstance(node.body[0], ast.Raise | ast.Return):
            yield node, "dropped guard", function


def _with_functions(node: ast.AST, prefix: str, function: str) -> Iterator[tuple[ast.AST, str]]:
    """All nodes below, each with the qualified name of its function; not those that only a type checker sees."""
    for field, value in ast.iter_fields(node):
        inside, path = function, prefix
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and field == "body":
            inside, path = prefix + node.name, f"{prefix}{node.name}.<locals>."
        elif isinstance(node, ast.ClassDef) and field == "body":
            path = f"{prefix}{node.name}."
        elif field in ("annotation", "returns") or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child, inside
                yield from _with_functions(child, path, inside)


def mutate(node: ast.AST, how: str) -> None:
    if isinstance(node, ast.Compare):
        node.ops[0] = SWAPPED[type(node.ops[0])]()
    elif isinstance(node, ast.BinOp | ast.BoolOp):
        node.op = SWAPPED[type(node.op)]()
    elif isinstance(node, ast.Constant):
        node.value = node.value + 1 if isinstance(node.value, int) else node.value * 2 + 0.5
    elif isinstance(node, ast.If):
        node.test = ast.Constant(False)


class Calls:
    """Which functions each test calls, how long it takes, and whether it passes as things are."""

    def __init__(self, rows: Sequence[dict]) -> None:
        self.rows = {row["test"]: row for row in rows if row["passed"] and not row.get("skipped")}
        self.of_file = defaultdict(list)
        for test in self.rows:
            self.of_file[test.split("::")[0]].append(test)

    def of_function(self, file: str, function: str) -> list[str]:
        """The tests that call a function, or where it has no name, any function of the file."""
        called = ((test, row["called"].get(file, ())) for test, row in self.rows.items())
        return [test for test, names in called if (function in names if function else names)]

    def seconds(self, tests: Sequence[str]) -> float:
        return sum(self.rows[test]["seconds"] for test in tests)

    def quickest(self, tests: Sequence[str]) -> list[str]:
        return sorted(tests, key=lambda test: self.rows[test]["seconds"])


def test_files(rooms: Sequence[str]) -> list[str]:
    """The test files of rooms, and those elsewhere whose name is that of a file of theirs; room by room."""
    found: list[Path] = []
    for room in rooms:
        for name in (room, *MORE_TESTS.get(room, ())):
            found += sorted((ROOT / "tests" / name).rglob("test_*.py"))
        for file in sorted((ROOT / "src" / "polyclinic" / room).rglob("*.py")):
            found += sorted((ROOT / "tests").rglob(f"test_{file.stem}.py"))
    return [str(path.relative_to(ROOT)) for path in dict.fromkeys(found)]


def copy_tree(copy: Path) -> None:
    """A copy of the tree, compiled; a compiled file counts as long as the text is the same."""
    for name in ("src", "tests", "benchmarks", "examples", "docs", "deploy"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
    for path in (*ROOT.glob("*.toml"), *ROOT.glob("*.md"), *ROOT.glob("*.txt")):
        shutil.copy(path, copy)
    checked = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(copy / "src", quiet=2, invalidation_mode=checked)


class Mutants:
    """A copy of the tree, one of whose files is changed at a time."""

    def __init__(self, copy: Path, seed: int, rooms: Sequence[str], calls: Calls) -> None:
        self.copy, self.calls, self.draw = copy, calls, random.Random(seed)
        self.files = {room: sorted((ROOT / "src" / "polyclinic" / room).rglob("*.py")) for room in rooms}
        self.count = seed  # which room is next

    def one(self, until: float) -> dict[str, object] | None:
        """Draw a mutant and run its tests until a moment; None for a file without a place to change."""
        room = list(self.files)[self.count % len(self.files)]
        [file] = self.draw.choices(self.files[room], [path.stat().st_size for path in self.files[room]])
        tree = ast.parse(file.read_text(encoding="utf-8"))
        places = list(mutations(tree))
        if not places:
            return None
        self.count += 1
        node, how, function = self.draw.choice(places)
        before = ast.unparse(node).splitlines()[0]
        mutate(node, how)
        changed = self.copy / file.relative_to(ROOT)
        changed.write_text(ast.unparse(tree), encoding="utf-8")
        killed, by = self._judge(room, file, function, until)
        shutil.copy(file, changed)
        where = f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        found = {"room": room, "where": where, "function": function, "how": how, "before": before}
        return {**found, "after": ast.unparse(node).splitlines()[0], "killed": killed, "by": by}

    def _judge(self, room: str, file: Path, function: str, until: float) -> tuple[bool | None, str]:
        """Whether a test fails that does not without the change, and which; None if they did not end in time."""
        calling, others = self._chosen(room, file, function)
        if not calling and not others:
            return None, "no watched test"
        tried, left = 0, LONGEST
        for tests in (*_portions(self.calls, calling), *_portions(self.calls, others)):
            if self.calls.seconds(tests) > left or time.monotonic() > until:
                return (None, "no time") if tried < len(calling) else (False, f"{tried} tests passed")
            failed = self._failed(tests, until)
            if failed != "":
                return (None, "no time") if failed is None else (True, failed)
            tried += len(tests)
            left -= self.calls.seconds(tests)
        return False, f"{tried} tests passed"

    def _chosen(self, room: str, file: Path, function: str) -> tuple[list[str], list[str]]:
        """Tests of the room that call the function, the quickest first; then those beside them in the same files."""
        name = str(file.relative_to(ROOT / "src"))
        rooms, own = tuple(f"tests/{one}/" for one in (room, *MORE_TESTS.get(room, ()))), f"/test_{file.stem}.py"
        calling = [t for t in self.calls.of_function(name, function) if t.startswith(rooms) or own in t]
        files = dict.fromkeys(test.split("::")[0] for test in calling)
        if not files:  # nobody calls it, or it is a number at the top of a file
            files = dict.fromkeys(path for path in self.calls.of_file if own in path)
        beside = [test for path in files for test in self.calls.of_file[path] if test not in set(calling)]
        return self.calls.quickest(calling), self.calls.quickest(beside)

    def _failed(self, tests: Sequence[str], until: float) -> str | None:
        """The test that fails, "" for none, None where the time came to its end."""
        limit = ENDLESS[0] * self.calls.seconds(tests) + ENDLESS[1]
        begun = time.monotonic()
        rows, ended = run_tests(self.copy, sorted(tests), min(limit, max(1.0, until - begun)))
        failed = [row["test"] for row in rows if not row["passed"]]
        if failed:
            return failed[0]
        if not ended:
            return "the tests do not end" if time.monotonic() - begun >= limit else None
        # fewer rows than tests: the process died, or a file cannot be imported
        return "" if len(rows) >= len(tests) else "the tests cannot run"


def _portions(calls: Calls, tests: Sequence[str]) -> Iterator[list[str]]:
    """The quickest tests, and then all others."""
    first: list[str] = []
    for test in tests:
        if first and calls.seconds(first) + calls.seconds([test]) > FIRST:
            break
        first.append(test)
    yield from (part for part in (first, list(tests[len(first) :])) if part)


def counted(found: list[dict], seed: int, rooms: Sequence[str]) -> dict[str, Any]:
    """Killed and tried in each room, and those that live or were not judged."""
    counts = {}
    for room in rooms:
        judged = [one["killed"] for one in found if one["room"] == room and one["killed"] is not None]
        if judged:
            counts[room] = {"tried": len(judged), "killed": sum(judged)}
    alive = [one for one in found if one["killed"] is False]
    unjudged = [one for one in found if one["killed"] is None]
    return {"seed": seed, "rooms": counts, "alive": alive, "not_judged": unjudged}


def watch(files: Sequence[str], workers: int, place: Path, until: float, kept: Path | None) -> list[dict]:
    """The calls of all tests of these files; those of files in `kept` are known, and new ones are added to it."""
    known: list[dict] = []
    if kept and kept.exists():
        with gzip.open(kept, "rt", encoding="utf-8") as lines:
            known = [json.loads(line) for line in lines]
    missing = [file for file in files if file not in {row["file"] for row in known}]

    def work(number: int, tell: Callable[[Any], None]) -> None:
        for file in missing[number::workers]:
            if time.monotonic() > until:
                return
            rows, _ = run_tests(place / str(number), [file], min(LONGEST_FILE, until - time.monotonic()), watch=True)
            for row in rows or [{"test": file, "passed": False, "called": {}, "seconds": 0.0}]:
                tell({"file": file, **row})

    def keep(rows: list[Any]) -> None:
        if kept:
            with gzip.open(kept, "wt", encoding="utf-8") as lines:
                lines.writelines(json.dumps(row) + "\n" for row in [*known, *rows])

    told, _ = in_parallel(work, workers, place / "watched", until, keep)
    keep(told)
    return [*known, *told]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two mutants")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", default=",".join(ROOMS))
    parser.add_argument("--calls", type=Path, help="which functions each test calls: read, and written (.jsonl.gz)")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    started, rooms = time.monotonic(), chosen.rooms.split(",")
    until = started + 60 * chosen.minutes
    warm()

    def write(found: list[Any]) -> dict[str, Any]:
        result = counted(found, chosen.seed, rooms)
        if chosen.json:
            chosen.json.write_text(json.dumps(result, indent=1) + "\n")
        return result

    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        for number in range(chosen.workers):
            copy_tree(place / str(number))
        (place / "watched").mkdir()
        half = started + 30 * chosen.minutes  # tests that are not watched by then judge nothing
        calls = Calls(watch(test_files(rooms), chosen.workers, place, half, chosen.calls))

        def work(number: int, tell: Callable[[Any], None]) -> None:
            mutants = Mutants(place / str(number), chosen.seed * 1009 + number, rooms, calls)
            done = 0
            while time.monotonic() < until and not (chosen.quick and done >= 2):
                if (mutant := mutants.one(until)) is not None:
                    done += 1
                    tell(mutant)

        told, crashed = in_parallel(work, chosen.workers, place, until, lambda found: write(found) and None)
    result = write(told)
    short = {name: len(result[name]) for name in ("alive", "not_judged")}
    print(json.dumps(result | short | {"crashed": crashed}))


if __name__ == "__main__":
    main()
