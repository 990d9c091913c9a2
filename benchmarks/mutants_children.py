"""Tests in forked children of a process that has imported what is large and never changes, such as torch.

A child imports Polyclinic from a copy of the tree, so that it sees the mutant in it. While tests are watched, each one
is noted with the functions that it calls: only these tests can notice a change of such a function.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

#: imported once, where it is installed
LARGE = (
    *("torch", "numpy", "scipy.stats", "scipy.ndimage", "pytest", "hypothesis", "pydantic", "rich", "typer"),
    *("PIL.Image", "safetensors.torch", "cryptography.hazmat.primitives", "opacus", "opacus.accountants", "pydicom"),
    *("matplotlib.pyplot", "jsonschema", "httpx", "fastapi.testclient", "typer.testing", "rich.progress", "psutil"),
    *("scipy.optimize", "scipy.signal", "scipy.spatial", "cryptography.x509", "filelock", "tomli_w"),
    *("nibabel", "monai.networks.nets", "monai.losses", "monai.metrics", "torch.utils.flop_counter", "torch.func"),
)
#: bytes of memory that the tests of a mutant may take: one may ask for an endless array
MEMORY = 48 * 2**30


def warm() -> None:
    """Import what all children need."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a process that has looked at a GPU cannot be forked
    for name in LARGE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


class Watcher:
    """A plug-in of pytest: a line of JSON for each test, with the functions that it called where `source` is given."""

    def __init__(self, told: Path, source: Path | None) -> None:
        self.told = told.open("a", buffering=1, encoding="utf-8")
        self.source = f"{source}/" if source else ""
        self.passed, self.skipped = True, False
        self.called, self.shared = set[tuple[str, str]](), set[tuple[str, str]]()

    def pytest_runtest_setup(self, item: Any) -> None:
        self.passed, self.skipped, self.started = True, False, time.process_time()
        self.called.clear()  # of what was called while files were imported
        if self.source and hasattr(sys, "monitoring"):
            sys.monitoring.restart_events()

    def pytest_runtest_call(self, item: Any) -> None:
        self.shared |= self.called  # what a fixture did may concern all tests of the file

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.passed &= not report.failed
        self.skipped |= report.skipped
        if report.when != "teardown":
            return
        row = {"test": report.nodeid, "passed": self.passed, "skipped": self.skipped}
        called = self.called | self.shared if self.source else set()
        self._tell({**row, "seconds": round(time.process_time() - self.started, 2), "called": _by_file(called)})

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._tell({"test": report.nodeid, "passed": False, "seconds": 0.0, "called": {}})

    def _tell(self, row: dict[str, Any]) -> None:
        print(json.dumps(row), file=self.told)

    # --- functions that are called ---------------------------------------------------------------

    def begin(self) -> None:
        """Note the functions of the source that are called from now on."""
        if hasattr(sys, "monitoring"):  # from Python 3.12 on: at no cost after the first call
            sys.monitoring.use_tool_id(4, "mutants")
            sys.monitoring.register_callback(4, sys.monitoring.events.PY_START, self._begun)
            sys.monitoring.set_events(4, sys.monitoring.events.PY_START)
        else:
            threading.settrace(self._traced)
            sys.settrace(self._traced)

    def _begun(self, code: CodeType, offset: int) -> Any:
        self._note(code)
        return sys.monitoring.DISABLE

    def _traced(self, frame: FrameType, event: str, argument: object) -> None:
        self._note(frame.f_code)

    def _note(self, code: CodeType) -> None:
        if code.co_filename.startswith(self.source):
            self.called.add((code.co_filename.removeprefix(self.source), code.co_qualname))


def _by_file(called: set[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for file, name in sorted(called):
        found.setdefault(file, []).append(name)
    return found


def run_tests(copy: Path, chosen: Sequence[str], limit: float, *, watch: bool = False) -> tuple[list[dict], bool]:
    """Run tests of a copy of the tree, watched, or only until one fails; a row for each, and whether they ended."""
    told = copy / "told.jsonl"
    told.unlink(missing_ok=True)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _be_child(copy, chosen, told, watch)
    ended = _wait(child, limit)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what a test started ends with it
    if not ended:
        os.waitpid(child, 0)
    return list(rows_of(told)), ended


def rows_of(told: Path) -> Iterator[dict]:
    for line in told.read_text().splitlines(keepends=True) if told.exists() else ():
        if line.endswith("\n"):  # the last one may be half written
            yield json.loads(line)


def _wait(child: int, limit: float) -> bool:
    until = time.monotonic() + limit
    while time.monotonic() < until:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.02)
    return False


def _be_child(copy: Path, chosen: Sequence[str], told: Path, watch: bool) -> None:
    code = 70
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        silent = os.open(copy / "printed.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        os.chdir(copy)
        sys.dont_write_bytecode = True  # compiled mutants would stay behind
        sys.path[:] = [str(copy / "src"), *(path for path in sys.path if not path.rstrip("/").endswith("/src"))]
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        import pytest

        watcher = Watcher(told, copy / "src" if watch else None)
        if watch:
            watcher.begin()
        options = ["-q", "--tb=line", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist"]
        code = int(pytest.main([*options, *([] if watch else ["-x"]), *chosen], plugins=[watcher]))
    finally:
        sys.stdout.flush()
        os._exit(code)
