"""Which lines of the source each test runs, how long it takes, and whether it passes as things are."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TextIO


class Watcher:
    """A plug-in of pytest: a line of JSON for each test, with the lines that it ran where it is watched."""

    def __init__(self, source: Path) -> None:
        self.source = f"{source}/"
        self.told: TextIO | None = None
        self.watch = self.failed = False
        self.passed, self.skipped, self.setup = True, False, 0.0
        self.ran: dict[str, set[int]] = {}
        self.shared: dict[str, int] = {}

    def begin(self, told: Path, watched: Iterable[CodeType] = ()) -> None:
        """Tell of all tests from now on, with the lines that run of this code."""
        codes = list(watched)
        self.told, self.watch = told.open("a", buffering=1, encoding="utf-8"), bool(codes)
        if codes:
            self._note_lines(codes)

    def pytest_runtest_setup(self, item: Any) -> None:
        self.passed, self.skipped, self.started = True, False, time.perf_counter()
        self.ran = {}  # without what ran while files were imported
        if self.watch and hasattr(sys, "monitoring"):
            sys.monitoring.restart_events()

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.passed &= not report.failed
        self.skipped |= report.skipped
        if report.when == "setup":
            self.setup = time.perf_counter() - self.started
            self.shared = _joined(self.shared, self._masks())  # a fixture may concern all tests of the file
        elif report.when == "teardown":
            self._tell(report.nodeid, time.perf_counter() - self.started - self.setup)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and self.told:
            self.passed, self.setup = False, 0.0
            self._tell(report.nodeid, 0.0)

    def _tell(self, test: str, seconds: float) -> None:
        self.failed |= not self.passed
        row = {"test": test, "passed": self.passed, "skipped": self.skipped, "setup": round(self.setup, 2)}
        lines = _joined(self.shared, self._masks()) if self.watch else {}
        row |= {"seconds": round(seconds, 2), "lines": {file: f"{mask:x}" for file, mask in lines.items()}}
        print(json.dumps(row), file=self.told)

    def _masks(self) -> dict[str, int]:
        return {file: sum(1 << line for line in lines) for file, lines in list(self.ran.items())}

    # --- lines that run --------------------------------------------------------------------------

    def _note_lines(self, codes: Sequence[CodeType]) -> None:
        if hasattr(sys, "monitoring"):  # from Python 3.12 on: at no cost after the first time
            sys.monitoring.use_tool_id(4, "mutants")
            sys.monitoring.register_callback(4, sys.monitoring.events.LINE, self._begun)
            for code in codes:  # to watch all of Python would take twice as long
                sys.monitoring.set_local_events(4, code, sys.monitoring.events.LINE)
        else:
            threading.settrace(self._traced)
            sys.settrace(self._traced)

    def _begun(self, code: CodeType, line: int) -> Any:
        if code.co_filename.startswith(self.source):
            self.ran.setdefault(code.co_filename.removeprefix(self.source), set()).add(line)
        return sys.monitoring.DISABLE

    def _traced(self, frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(self.source):
            return None
        self.ran.setdefault(name.removeprefix(self.source), set()).add(frame.f_lineno)
        return self._traced


def _joined(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {file: one.get(file, 0) | other.get(file, 0) for file in one.keys() | other.keys()}


class Lines:
    """The rows of watched tests that pass, asked by line."""

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.setup: dict[str, float] = {}
        for row in rows:
            file = row["test"].split("::")[0]
            self.setup[file] = max(self.setup.get(file, 0.0), row["setup"])
            if row["passed"] and not row["skipped"]:
                masks = {name: int(mask, 16) for name, mask in row["lines"].items()}
                self.rows[row["test"]] = {"seconds": row["seconds"], "lines": masks}

    def of(self, file: str, lines: Sequence[int]) -> list[str]:
        """The tests that run one of these lines of a file, or where none is given, any; the quickest first."""
        wanted = sum(1 << line for line in set(lines)) if lines else -1
        return self.quickest([test for test, row in self.rows.items() if row["lines"].get(file, 0) & wanted])

    def reading(self, module: str) -> list[str]:
        """The tests of files that import from a module: they may read a value of it without running a line."""
        package, _, name = module.rpartition(".")
        words = re.compile(rf"{re.escape(module)}\b|from {re.escape(package)} import .*\b{name}\b")
        files = {test.split("::")[0] for test in self.rows}
        reading = {file for file in files if words.search(Path(file).read_text(encoding="utf-8"))}
        return [test for test in self.rows if test.split("::")[0] in reading]

    def seconds(self, tests: Sequence[str]) -> float:
        """What tests take together; fixtures are counted once a file."""
        files = {test.split("::")[0] for test in tests}
        return sum(self.rows[test]["seconds"] for test in tests) + sum(self.setup[file] for file in files)

    def quickest(self, tests: Sequence[str]) -> list[str]:
        return sorted(tests, key=lambda test: (self.seconds([test]), test))


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def read_kept(kept: Path | None, root: Path) -> list[dict[str, Any]]:
    """Rows of test files that are as they were; of a file of the source that changed, every line counts."""
    if kept is None or not kept.exists():
        return []
    with gzip.open(kept, "rt", encoding="utf-8") as text:
        digests, *rows = [json.loads(line) for line in text]
    changed = {name for name, digest in digests.items() if _differs(root / name, digest)}
    rows = [row for row in rows if row["file"] not in changed]
    for row in rows:
        for file in row["lines"]:
            if f"src/{file}" in changed:
                row["lines"][file] = "f" * 400
    return rows


def _differs(path: Path, digest: str) -> bool:
    return not path.exists() or digest_of(path) != digest


def write_kept(kept: Path, rows: Sequence[dict[str, Any]], root: Path) -> None:
    """The rows, after a line with the digests of the files that they depend on."""
    names = {row["file"] for row in rows} | {f"src/{file}" for row in rows for file in row["lines"]}
    digests = {name: digest_of(root / name) for name in sorted(names) if (root / name).exists()}
    partial = kept.with_name(f".{kept.name}")
    with gzip.open(partial, "wt", encoding="utf-8", compresslevel=3) as text:
        text.writelines(json.dumps(row) + "\n" for row in [digests, *rows])
    partial.replace(kept)
