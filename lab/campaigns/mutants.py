"""The mutation campaign: one operator, comparison or number of the source is exchanged, and the tests must notice.

    python lab/campaigns/mutants.py [--rooms privacy,...] [--kind arithmetic] [--number N] [--seed S] [--json FILE]

Mutants are drawn by the seed from the files of the rooms. Each meets the test files that import the changed module or a
module that imports it, those of the same name first, in a forked process that has torch already. A mutant that survives
is printed as a difference of one line; somebody has to judge whether it changes anything. Tests that fail by themselves
notice nothing, which is said. Code that a test runs in a process of another program is not changed.
"""

import argparse
import ast
import contextlib
import importlib.abc
import importlib.util
import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SOURCE, TESTS = ROOT / "src", ROOT / "tests"
ARITHMETIC = {
    "*": ("/", "+"),
    "/": ("*", "-"),
    "+": ("-", "*"),
    "-": ("+", "/"),
    "**": ("*",),
    "//": ("*",),
    "%": ("*",),
}
COMPARED = {"<": ("<=", ">"), "<=": ("<", ">"), ">": (">=", "<"), ">=": (">", "<"), "==": ("!=",), "!=": ("==",)}
COMPARED |= {"in": ("not in",), "not in": ("in",), "is": ("is not",), "is not": ("is",), "and": ("or",), "or": ("and",)}
SYMBOLS: dict[type, str] = {
    **{ast.Mult: "*", ast.Div: "/", ast.Add: "+", ast.Sub: "-", ast.Pow: "**", ast.FloorDiv: "//", ast.Mod: "%"},
    **{ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="},
    **{ast.In: "in", ast.NotIn: "not in", ast.Is: "is", ast.IsNot: "is not", ast.And: "and", ast.Or: "or"},
}


@dataclass(frozen=True)
class Mutant:
    """Characters of one line that are exchanged."""

    file: str
    line: int
    start: int
    old: str
    new: str

    def applied(self, text: str) -> str:
        lines = text.splitlines(keepends=True)
        line = lines[self.line - 1].encode()
        assert line[self.start :].startswith(self.old.encode())
        lines[self.line - 1] = (line[: self.start] + self.new.encode() + line[self.start + len(self.old) :]).decode()
        return "".join(lines)


def mutants_of(file: Path, kind: str) -> Iterator[Mutant]:
    """All mutants of a file; `arithmetic`: of operators of numbers only."""
    text = file.read_text()
    lines = [line.encode() for line in text.splitlines()]
    name = str(file.relative_to(ROOT))

    def between(left: ast.expr, right: ast.expr, symbol: str) -> Iterator[Mutant]:
        """The operator between two operands on one line; brackets may stand there too."""
        if left.end_lineno != right.lineno or left.end_col_offset is None:
            return
        gap = lines[right.lineno - 1][left.end_col_offset : right.col_offset].decode()
        if len(found := list(re.finditer(rf"(?<![\w*/<>=!]){re.escape(symbol)}(?![\w*/=])", gap))) == 1:
            choices = ARITHMETIC if symbol in ARITHMETIC else COMPARED
            for new in choices[symbol] if kind == "all" or symbol in ARITHMETIC else ():
                yield Mutant(name, right.lineno, left.end_col_offset + found[0].start(), symbol, new)

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.BinOp) and type(node.op) in SYMBOLS:
            yield from between(node.left, node.right, SYMBOLS[type(node.op)])
        elif isinstance(node, ast.Compare):
            for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                yield from between(left, right, SYMBOLS[type(op)])
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from between(left, right, SYMBOLS[type(node.op)])
        elif kind == "all" and isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            symbol = "not " if isinstance(node.op, ast.Not) else "-"
            if lines[node.lineno - 1][node.col_offset :].startswith(symbol.encode()):
                yield Mutant(name, node.lineno, node.col_offset, symbol, "")
        elif kind == "all" and isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            old = lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()
            new = str(not node.value) if isinstance(node.value, bool) else f"({old} + 1)"
            yield Mutant(name, node.lineno, node.col_offset, old, new)


def imported_by(file: Path) -> set[str]:
    """The modules of Polyclinic that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("polyclinic"):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("polyclinic")}
    return found


def module_of(file: str) -> str:
    return file.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def tests_of(file: str, most: int) -> list[str]:
    """Test files that meet a module, the likeliest first: those of its name, of its room, that import it, and last
    those that import what imports it."""
    module, room = module_of(file), Path(file).parent.relative_to("src/polyclinic")
    users = {module_of(str(one.relative_to(ROOT))) for one in SOURCE.rglob("*.py") if module in imported_by(one)}
    rated = []
    for test in sorted(TESTS.rglob("test_*.py")):
        imported, stem = imported_by(test), Path(file).stem
        rate = 4 * (module in imported) + bool(users & imported)
        rate += 2 * (stem in test.stem) + 2 * (TESTS / room == test.parent) if rate else 0
        rated.append((-rate, test.stat().st_size, str(test)))
    return [test for rate, _, test in sorted(rated) if rate][:most]


class Loader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a changed text."""

    def __init__(self, mutant: Mutant) -> None:
        self.name, self.file = module_of(mutant.file), ROOT / mutant.file
        self.text = mutant.applied(self.file.read_text())

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.file, loader=self)

    def exec_module(self, module: Any) -> None:
        exec(compile(self.text, str(self.file), "exec"), module.__dict__)


def outcome_of(mutant: Mutant | None, tests: list[str], seconds: float) -> str:
    """What becomes of a mutant (None: the source as it is): `noticed`, `survived`, `took too long`."""
    child = os.fork()
    if child == 0:
        os.setsid()
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        import pytest

        if mutant is not None:
            sys.meta_path.insert(0, Loader(mutant))
        os.chdir(ROOT)
        os._exit(pytest.main(["-x", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow", *tests]))
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return "survived" if os.waitstatus_to_exitcode(status) == 0 else "noticed"
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "took too long"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rooms", default="privacy,federation,deployment,training", help="folders or files of the source"
    )
    parser.add_argument("--kind", choices=("all", "arithmetic"), default="all")
    parser.add_argument("--number", type=int, default=300, help="how many are drawn; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", type=int, default=8, help="most test files that a mutant meets")
    parser.add_argument("--seconds", type=float, default=300.0, help="most for the tests of a mutant")
    parser.add_argument("--only", default="", help="words that the changed line has: a regular expression")
    parser.add_argument("--json", type=Path, help="a line for each mutant is added to this file")
    chosen = parser.parse_args()
    import torch  # noqa: F401 - here: every forked process has it then

    files = []
    for room in chosen.rooms.split(","):
        place = SOURCE / "polyclinic" / room
        files += sorted(place.rglob("*.py")) if place.is_dir() else [place]
    drawn = [one for file in files for one in mutants_of(file, chosen.kind)]
    drawn = [one for one in drawn if re.search(chosen.only, (ROOT / one.file).read_text().splitlines()[one.line - 1])]
    if chosen.number:
        drawn = random.Random(chosen.seed).sample(drawn, min(chosen.number, len(drawn)))
    ended: Counter[str] = Counter()
    as_it_is: dict[str, str] = {}
    for mutant in drawn:
        tests = tests_of(mutant.file, chosen.tests)
        outcome = outcome_of(mutant, tests, chosen.seconds)
        if outcome == "noticed" and mutant.file not in as_it_is:
            as_it_is[mutant.file] = outcome_of(None, tests, 2 * chosen.seconds)
        if outcome == "noticed" and as_it_is[mutant.file] != "survived":
            outcome = "its tests fail by themselves"
        ended[outcome] += 1
        line = (ROOT / mutant.file).read_text().splitlines()[mutant.line - 1].strip()
        found = {"seed": chosen.seed, **asdict(mutant), "text": line, "outcome": outcome}
        if outcome != "noticed":
            print(f"{outcome}: {mutant.file}:{mutant.line}: {mutant.old} -> {mutant.new}: {line}", flush=True)
        if chosen.json:
            with chosen.json.open("a") as file:
                print(json.dumps(found), file=file)
    print(json.dumps({"seed": chosen.seed, "rooms": chosen.rooms, "mutants": len(drawn), "ended": ended}), flush=True)


if __name__ == "__main__":
    main()
