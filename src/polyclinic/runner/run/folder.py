"""Locks of a run folder: one run at a time, and no run while a worker of an earlier one may still write.

A run holds the file `.lock`. Each of its worker processes holds a lock file of its own in `.workers/`. When a run is
killed, `.lock` is free at once, but its workers take a moment to notice: the next run waits for their locks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from polyclinic.errors import BadInput
from polyclinic.files import lock

LOCK = ".lock"
WORKERS = ".workers"
#: seconds that the workers of a run that was killed have to end: they do at once, unless the machine is very busy
ENDS_WITHIN = 60.0
#: seconds for which the lock may be held by somebody who only looks (`is_held`), and does so for an instant
LOOKS_WITHIN = 0.5


@contextlib.contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold a run folder: BadInput if another run holds it, or if a worker of an earlier run does not end."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(lock(folder / LOCK, wait=LOOKS_WITHIN))
        except TimeoutError:
            raise BadInput(
                f"--out {folder}: another run is working in it; wait for it, or name another folder"
            ) from None
        for file in (folder / WORKERS).glob("*.lock"):
            _wait_for_worker(file, folder)
        shutil.rmtree(folder / WORKERS, ignore_errors=True)
        try:
            yield
        finally:
            shutil.rmtree(folder / WORKERS, ignore_errors=True)


def _wait_for_worker(file: Path, folder: Path) -> None:
    try:
        with lock(file, wait=ENDS_WITHIN):
            pass
    except TimeoutError:
        raise BadInput(
            f"--out {folder}: process {file.stem}, a worker of an earlier run, has not ended yet; "
            "wait for it or end it, or name another folder"
        ) from None


def is_held(folder: Path) -> bool:
    """Whether a run works in the folder now."""
    if not (folder / LOCK).exists():
        return False
    try:
        with lock(folder / LOCK, wait=0):
            return False
    except TimeoutError:
        return True


@contextlib.contextmanager
def worker_lock(folder: Path) -> Iterator[None]:
    """Hold a worker's lock, for as long as this process writes into the folder."""
    (folder / WORKERS).mkdir(parents=True, exist_ok=True)
    with lock(folder / WORKERS / f"{os.getpid()}.lock", wait=0):
        yield
