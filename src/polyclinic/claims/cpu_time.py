"""CPU seconds of a run and of what was measured of it, kept in its `origin.json`.

Seconds of the clock say more about how busy the machine was than about the run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polyclinic.files import atomic_write, read_json

#: in a run folder: the machine, the commit and the date of the run, and its CPU seconds
ORIGIN = "origin.json"
#: the table of CPU seconds in `origin.json`, and the name of the run itself in it
CPU, RUN = "cpu_seconds", "run"


def cpu_seconds() -> float:
    """User and system time of this process and of its children that were waited for."""
    return sum(os.times()[:4])


@contextmanager
def counted(run: Path, what: str) -> Iterator[None]:
    """Add the CPU seconds of the block to the note of a run; nothing where the run has none."""
    begin = cpu_seconds()
    yield
    add_cpu(run, what, cpu_seconds() - begin)


def add_cpu(run: Path, what: str, seconds: float) -> None:
    """A run that was killed and resumed has no note of itself: what its first part took is not known."""
    if not (run / ORIGIN).is_file():
        return
    note = read_json(run / ORIGIN)
    spent = note.setdefault(CPU, {})
    spent[what] = round(spent.get(what, 0.0) + seconds, 2)
    atomic_write(run / ORIGIN, json.dumps(note, indent=1) + "\n")


def cpu_of(run: Path) -> float | None:
    """CPU seconds of a run and all that was measured of it; None where they are not known, or a GPU helped."""
    note = read_json(run / ORIGIN) if (run / ORIGIN).is_file() else {}
    spent = note.get(CPU, {})
    return sum(spent.values()) if RUN in spent and "no GPU" in note["machine"] else None
