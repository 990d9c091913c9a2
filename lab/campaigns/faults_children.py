"""Trials of the fault campaign: commands in forked children, and how each one ended.

The process that forks has imported everything and has run the study once: a child is there in hundredths of a second,
and is as real to the code under test (own memory, own files, `kill -9`) as one from the command line.
"""

import contextlib
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyclinic.cli import run_app

#: processor seconds after which a trial counts as hung; no command on these studies needs one tenth of it
HANGS_AFTER = 5.0
#: seconds that a trial may neither work nor wait for a processor: it waits for something that does not come
IDLES_AFTER = 30.0
#: seconds after which a trial is ended and counts as hung, however busy the machine is
ENDED_AFTER = 600.0
#: the exit code of a child that ended in an exception
CRASHED = 70

TABLES: dict[str, dict[str, Any]] = {
    "data": {"source": "fundus-phantom", "samples": 48, "size": 28},
    "sites": {"partition": "iid", "count": 3},
    "model": {"backbone": "lenet5"},
    "optimizer": {"batch_size": 8, "lr": 0.05},
    "engine": {"workers": 1, "device": "cpu", "quorum": 0.3},
}
#: methods whose files differ: averages, turns, states at the sites, cut networks, gradients, own models, latents
METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "fedavg": {},
    "cwt": {"optimizer": {"keep_state": True}, "evaluation": {"handovers": "all"}},
    "scaffold": {},
    "splitnn": {"optimizer": {"keep_state": True}},
    "fedsgd": {"engine": {"checkpoint_every": 2}},
    "ditto": {"evaluation": {"select": "best"}},
    "fedreplay": {},
}
#: further methods whose sites lie: what they send, or what is made of it, differs
LYING: dict[str, dict[str, dict[str, Any]]] = {
    name: {} for name in ("feddyn", "moon", "fedopt", "fedrep", "finetune", "fedavg-share")
}


@dataclass(frozen=True)
class Outcome:
    """How a child ended: its exit code (minus the signal that ended it), what it printed, its processor seconds."""

    code: int
    printed: str
    seconds: float
    hung: bool

    @property
    def crashed(self) -> bool:
        return self.code == CRASHED or self.code < 0 or "Traceback (most recent" in self.printed


@dataclass(frozen=True)
class Trial:
    """One trial: what was tried, and what was wrong with how it ended ("" for nothing)."""

    kind: str
    what: str
    problem: str = ""
    detail: str = ""
    seconds: float = 0.0  # of a processor, of the command under test


def tables_of(method: str, rounds: int = 2) -> dict[str, dict[str, Any]]:
    """The tables of a study that runs in a tenth of a second."""
    tables = {name: dict(table) for name, table in TABLES.items()}
    for name, table in (METHODS | LYING)[method].items():
        tables[name] = tables.get(name, {}) | table
    return tables | {"method": {"name": method, "rounds": rounds}}


def in_child(work: Callable[[], int], *, kill_after: float | None = None) -> Outcome:
    """Do the work in a forked child. `kill_after`: `kill -9` after so many seconds, if it still runs."""
    with tempfile.TemporaryFile() as printed:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            _be_child(work, printed.fileno())
        status, usage, hung = _wait(child, kill_after)
        printed.seek(0)
        text = printed.read().decode(errors="replace")
    seconds = usage.ru_utime + usage.ru_stime
    return Outcome(os.waitstatus_to_exitcode(status), text, seconds, hung or seconds > HANGS_AFTER)


def _be_child(work: Callable[[], int], printed: int) -> None:
    code = CRASHED
    try:
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(child: int, kill_after: float | None) -> tuple[int, Any, bool]:
    started = time.monotonic()
    while True:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            return status, usage, False
        waited = time.monotonic() - started
        hung = kill_after is None and _hangs(child, waited)
        if hung or (kill_after is not None and waited > kill_after):
            os.kill(child, signal.SIGKILL)
            _, status, usage = os.wait4(child, 0)
            return status, usage, hung
        time.sleep(0.002 if waited < 5 else 0.2)


def _hangs(child: int, waited: float) -> bool:
    """Whether a child had the processor for too long, or idles. One that waits for a busy processor does neither."""
    if waited < HANGS_AFTER:
        return False
    worked, queued = _scheduled(child)
    return waited > ENDED_AFTER or worked > HANGS_AFTER or waited - worked - queued > IDLES_AFTER


def _scheduled(child: int) -> tuple[float, float]:
    """The seconds for which a process, all its threads together, had a processor, and waited for one."""
    worked = queued = 0.0
    for task in Path(f"/proc/{child}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # a thread may end meanwhile
            ran, waiting, _ = task.read_text().split()
            worked, queued = worked + int(ran) / 1e9, queued + int(waiting) / 1e9
    return worked, queued


def command(*arguments: object) -> Outcome:
    """A command line, as `polyclinic ARGUMENTS` runs it, in a child."""
    return in_child(lambda: run_app([str(argument) for argument in arguments]))


def resume(folder: Path) -> Outcome:
    return command("run", "--resume", "--quiet", "--out", folder)


def signature(folder: Path) -> str:
    """A digest of all that a run must end in, whatever happened to it: weights, metrics, bytes, history, ledgers."""
    result = json.loads((folder / "result.json").read_text())
    kept = {name: value for name, value in result.items() if name not in ("timing", "warnings")}
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    lines = [{name: value for name, value in line.items() if name != "seconds"} for line in history]
    digest = hashlib.sha256(json.dumps([kept, lines], sort_keys=True).encode())
    for path in sorted((folder / "ledger").glob("*.jsonl")):
        digest.update(path.name.encode() + path.read_bytes())
    digest.update((folder / "model.safetensors").read_bytes())
    return digest.hexdigest()


def used(folder: Path) -> str:
    """A digest of what a method made of the replies: weights and metrics, whatever was counted beside them."""
    result = json.loads((folder / "result.json").read_text())
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    found = [result["weights_sha256"], result["metrics"], [line["validation"] for line in history]]
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def problem_of(outcome: Outcome, folder: Path, expected: str) -> str:
    """What is wrong with a command that must end in the expected run, or in a sentence."""
    if outcome.hung:
        return "hang"
    if outcome.crashed:
        return "traceback"
    if outcome.code not in (0, 1, 2):
        return f"exit code {outcome.code}"
    if outcome.code == 0:
        return _difference(folder, expected)
    return "" if outcome.printed.strip() else "no sentence"


def _difference(folder: Path, expected: str) -> str:
    try:
        return "" if signature(folder) == expected else "other result"
    except (ValueError, KeyError, OSError) as error:
        return f"other result, which cannot be read ({error})"


def tail(outcome: Outcome, lines: int = 6) -> str:
    return " | ".join(outcome.printed.strip().splitlines()[-lines:])[-600:]


def totals(trials: Sequence[Trial]) -> dict[str, Any]:
    """Counts by kind of fault, and every trial that failed."""
    kinds = dict.fromkeys(trial.kind for trial in trials)
    counted = {
        kind: {
            "tried": sum(trial.kind == kind for trial in trials),
            "failed": sum(trial.kind == kind and bool(trial.problem) for trial in trials),
            "longest": round(max(trial.seconds for trial in trials if trial.kind == kind), 2),
        }
        for kind in kinds
    }
    failed = [vars(trial) for trial in trials if trial.problem]
    return {"kinds": counted, "failures": failed[:100]}
