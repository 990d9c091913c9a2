"""`origin.json` in a run folder: the machine, the commit and the date of the run, and its CPU seconds.

A record may be made of a run later, and elsewhere. Seconds of the clock say more about how busy the machine was than
about the run.
"""

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from polyclinic.engines.worker_process import cores
from polyclinic.files import atomic_write, read_json
from polyclinic.json_types import JsonObject

ORIGIN = "origin.json"
#: the table of CPU seconds in `origin.json`, and the name of the run itself in it
CPU, RUN = "cpu_seconds", "run"
#: the commit of a tree that was exported from its repository, as whoever runs it says
GIVEN = "POLYCLINIC_COMMIT"


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


def note_origin(run: Path, cpu: float | None = None) -> None:
    """Write the note of a run that has just ended here.

    `cpu`: its CPU seconds; None for a run that was resumed, as nobody knows what its first part took.
    """
    atomic_write(run / ORIGIN, json.dumps(origin(), indent=1) + "\n")
    if cpu is not None:
        add_cpu(run, RUN, cpu)


def origin() -> JsonObject:
    """The date, the machine and the commit of what runs now."""
    return {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "machine": machine(), **commit()}


def origin_of(runs: Sequence[Path]) -> JsonObject:
    """Where the runs of a claim come from; what is made here and now where no run says otherwise."""
    notes = [read_json(run / ORIGIN) for run in runs if (run / ORIGIN).is_file()]
    if not notes:
        return origin()
    told = {name: ", ".join(sorted({str(note[name]) for note in notes})) for name in ("machine", "commit")}
    date = max(str(note["date"]) for note in notes)
    return {"date": date, **told, "commit_given": any(note["commit_given"] for note in notes)}


def machine() -> str:
    """Cores that the process may use, and the GPU where there is one."""
    import torch

    some = f"{cores()} of " if cores() != os.cpu_count() else ""
    words = f"{some}{os.cpu_count()} cores, {platform.machine()}"
    return f"{torch.cuda.get_device_name()}, {words}" if torch.cuda.is_available() else f"{words}, no GPU"


def commit() -> dict[str, object]:
    """The commit of the code. `commit_given`: it is an exported tree, and the variable POLYCLINIC_COMMIT says so."""
    known = _head()
    return {"commit": known or os.environ.get(GIVEN, ""), "commit_given": not known and GIVEN in os.environ}


def last_commit(file: Path) -> str:
    """The last commit that changed a file of this package; empty where it has changes that are not committed.

    Outside a repository it is the given commit.
    """
    if not _head():
        return os.environ.get(GIVEN, "")
    return "" if git("status", "--porcelain", "--", str(file)) else git("log", "-1", "--format=%H", "--", str(file))


def _head() -> str:
    """The commit that this file is part of; empty in an exported tree, also where it lies inside another repository."""
    return git("rev-parse", "HEAD") if git("ls-files", "--", Path(__file__).name) else ""


def git(*words: str) -> str:
    """The answer of git about this file's folder; empty where there is no git, or no repository."""
    try:
        told = subprocess.run(
            ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return told.stdout.strip()
