"""Reservations: what a run of a deployed site will spend with the work it is doing now.

Runs at the same time share a budget. What a piece of work will cost is set aside before it begins, and given back when
it ends or fails; by then its lines are in the ledger. A process that was killed holds no lock any more, and what it had
set aside counts no longer.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from polyclinic.files import atomic_write, lock

FOLDER = "reserved"
#: held while private work is done: its epsilon is known afterwards, so that all that is left is set aside for it
EPSILON_LOCK = ".epsilon.lock"


class Reserved(NamedTuple):
    """Bytes and parcels of scores."""

    bytes: int = 0
    scores: int = 0


class Reservations:
    """What the runs of one site have set aside, a file in the kit for each run that works now."""

    def __init__(self, runs: Path, run: str) -> None:
        self._runs, self._folder, self._run = runs, runs.parent / FOLDER, run

    @contextlib.contextmanager
    def hold(self, wanted: Reserved) -> Iterator[None]:
        """Set this aside while something is done."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = self._file(self._run)
        with lock(self._lock(self._run)):
            atomic_write(file, json.dumps(wanted), private=True)
            try:
                yield
            finally:
                file.unlink(missing_ok=True)

    def of_others(self) -> Reserved:
        """What other runs have set aside."""
        found = [Reserved(*json.loads(file.read_text())) for file in self._working()]
        return Reserved(sum(one.bytes for one in found), sum(one.scores for one in found))

    @contextlib.contextmanager
    def alone_with_epsilon(self) -> Iterator[None]:
        """Wait until no other run does private work, and keep others from it meanwhile."""
        with lock(self._runs / EPSILON_LOCK):
            yield

    def _working(self) -> Iterator[Path]:
        for file in sorted(self._folder.glob("*.json")):
            if file != self._file(self._run) and not self._is_free(self._lock(file.stem)):
                yield file

    def _is_free(self, path: Path) -> bool:
        try:
            with lock(path, wait=0):
                return True
        except TimeoutError:
            return False

    def _file(self, run: str) -> Path:
        return self._folder / f"{run}.json"

    def _lock(self, run: str) -> Path:
        return self._folder / f".{run}.lock"
