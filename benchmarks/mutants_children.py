"""Tests in forked children, each with one mutant in memory: nothing is imported twice, and no file changes.

Two processes fork such children. A *server* has collected all tests once; its child exchanges the code of the changed
function. A process that has not imported Polyclinic forks the children of mutants that run at import.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from mutants_lines import Watcher
from mutants_places import SOURCE, Place

ROOT = SOURCE.parent
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
OPTIONS = ("-q", "-s", "--tb=line", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist")


def warm() -> None:
    """Import what all children need, and let Polyclinic come from this tree."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a process that has looked at a GPU cannot be forked
    sys.path[:] = [str(SOURCE), *(path for path in sys.path if not path.rstrip("/").endswith("/src"))]
    for name in LARGE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


@dataclass(frozen=True)
class Outcome:
    """A row for each test that ended, and whether the process ended by itself."""

    rows: list[dict[str, Any]]
    ended: bool


def forked(place: Path, work: Callable[[Path], None], limit: float) -> Outcome:
    """Run `work` in a child that writes rows to the file it is given; it ends after `limit` seconds at the latest."""
    told = place / f"told-{os.getpid()}.jsonl"
    told.unlink(missing_ok=True)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _be_child(work, told)
    ended = _wait(child, limit)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what a test started ends with it
    if not ended:
        os.waitpid(child, 0)
    shutil.rmtree(told.with_suffix(".tmp"), ignore_errors=True)
    return Outcome(_rows_of(told), ended)


def _be_child(work: Callable[[Path], None], told: Path) -> None:
    code = 70
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        work(told)
        code = 0
    finally:
        os._exit(code)


def _wait(child: int, limit: float) -> bool:
    until = time.monotonic() + limit
    while time.monotonic() < until:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.01)
    return False


def _rows_of(told: Path) -> list[dict[str, Any]]:
    lines = told.read_text(encoding="utf-8").splitlines(keepends=True) if told.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be half written


# --- mutants of functions: a server that has collected all tests ---------------------------------


class Server:
    """A plug-in of pytest that hands the collected tests over instead of running them."""

    def __init__(self, work: Callable[[Server], None], watcher: Watcher) -> None:
        self.work, self.watcher = work, watcher

    def pytest_runtestloop(self, session: Any) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        self.functions = _functions()
        _say(f"{len(self.items)} tests are collected")
        gc.freeze()  # children leave these pages alone
        self.work(self)
        return True

    def run(self, tests: Sequence[str], told: Path, *, place: Place | None = None, watch: bool = False) -> None:
        """In a child: run tests in this order, with a mutant or watched; unless watched, until one fails."""
        items = [self.items[test] for test in tests]
        items[0].config._tmp_path_factory._given_basetemp = told.with_suffix(".tmp")
        if place is not None:
            self._exchange(place)
        self.watcher.begin(told, self._all_codes() if watch else ())
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.watcher.failed and not watch:
                return

    def _all_codes(self) -> Iterator[CodeType]:
        for function in itertools.chain(*self.functions.values()):
            yield from (function.__code__, *_codes(function.__code__))

    def _exchange(self, place: Place) -> None:
        """Give the outermost function of the place its changed code; what is defined in it comes along."""
        for function, code in self._changes(place):
            function.__code__ = code

    def holds(self, place: Place) -> bool:
        """Whether the function of a place is in memory, so that it can be changed there."""
        return bool(self._changes(place))

    def _changes(self, place: Place) -> list[tuple[FunctionType, CodeType]]:
        outermost = place.function.split(".<locals>")[0]
        changed = [code for code in _codes(place.code()) if code.co_qualname == outermost]
        keys = [(code, (code.co_filename, outermost, code.co_firstlineno)) for code in changed]
        return [(function, code) for code, key in keys for function in self.functions.get(key, ())]


def serve(files: Sequence[str], work: Callable[[Server], None]) -> None:
    """Collect the tests of files, and hand them to `work`."""
    import pytest

    os.chdir(ROOT)
    _say("warm")
    for path in sorted((SOURCE / "polyclinic").rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        if not name.endswith("__main__"):
            with contextlib.suppress(Exception):  # one that wants an extra that is not here
                importlib.import_module(name)
    options = [*OPTIONS, "--continue-on-collection-errors"]
    watcher = Watcher(SOURCE)
    pytest.main([*options, *files], plugins=[Server(work, watcher), watcher])


def _say(what: str) -> None:
    print(f"{time.process_time():.0f} s: {what}", flush=True)


def _functions() -> dict[tuple[str, str, int], list[FunctionType]]:
    """All functions of the source that exist now, by file, name and line."""
    found: dict[tuple[str, str, int], list[FunctionType]] = {}
    for one in gc.get_objects():
        if isinstance(one, FunctionType) and one.__code__.co_filename.startswith(str(SOURCE)):
            code = one.__code__
            found.setdefault((code.co_filename, code.co_qualname, code.co_firstlineno), []).append(one)
    return found


def _codes(code: CodeType) -> list[CodeType]:
    inside = [one for one in code.co_consts if isinstance(one, CodeType)]
    return [*inside, *(deeper for one in inside for deeper in _codes(one))]


# --- mutants that run at import -------------------------------------------------------------------


def run_imported(tests: Sequence[str], told: Path, place: Place | None) -> None:
    """In a child of a process without Polyclinic: import it with a mutant, and run tests until one fails."""
    import pytest

    os.chdir(ROOT)
    sys.dont_write_bytecode = True
    if place is not None:
        sys.meta_path.insert(0, _Changed(place))
    watcher = Watcher(SOURCE)
    watcher.begin(told)
    pytest.main([*OPTIONS, "-x", f"--basetemp={told.with_suffix('.tmp')}", *tests], plugins=[watcher])


class _Changed(importlib.abc.MetaPathFinder):
    """Finds the one changed module."""

    def __init__(self, place: Place) -> None:
        self.path, self.code = SOURCE / place.file, place.code()
        parts = Path(place.file).with_suffix("").parts
        self.package = parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.package else parts)

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        inside = [str(self.path.parent)] if self.package else None
        loader = _Loader(name, str(self.path), self.code)
        return importlib.util.spec_from_file_location(name, self.path, loader=loader, submodule_search_locations=inside)


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, code: CodeType) -> None:
        super().__init__(name, path)
        self.changed = code

    def get_code(self, fullname: str) -> CodeType:
        return self.changed
