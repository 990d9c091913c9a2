"""Jobs that the server has started: runs and reports, each a `polyclinic` command in a process of its own.

A study may name plug-ins, so starting one runs code that its author chose. Only study files inside the folder that is
served can be started, and what a visitor sends is a name: never a setting, a path elsewhere, or a command.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from polyclinic.data.allowed_paths import folder_name, safe_name
from polyclinic.errors import BadInput
from polyclinic.json_types import JsonObject

#: commands that may be at work at once
MOST_AT_ONCE = 4
#: seconds that a run has to end by itself; then it is killed, which its folder survives
PATIENCE = 10.0
#: where the words of the commands are kept, in the folder that is served
LOGS = ".serve"

Start = Callable[..., subprocess.Popen]


@dataclass
class Job:
    """One command that was started: what it makes, and where."""

    kind: str
    name: str
    process: subprocess.Popen = field(repr=False)
    log: Path
    stop_asked: float | None = None

    @property
    def at_work(self) -> bool:
        return self.process.poll() is None

    def facts(self) -> JsonObject:
        code = self.process.poll()
        working, ended = ("stopping", "stopped") if self.stop_asked else ("at work", "failed")
        state = working if code is None else "done" if code == 0 else ended
        return {"kind": self.kind, "name": self.name, "state": state, "words": self._words() if code else ""}

    def _words(self) -> str:
        """The last line of the command's output."""
        with contextlib.suppress(OSError, IndexError):
            return self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1][:1000]
        return "it ended without a word"

    def stop(self) -> None:
        """Interrupt it, as Ctrl-C does; the second time, or after a while, kill it."""
        if self.at_work and self.stop_asked is not None:
            self.process.kill()
        elif self.at_work:
            self.stop_asked = time.monotonic()
            self.process.send_signal(signal.SIGTERM if os.name == "nt" else signal.SIGINT)

    def tend(self) -> None:
        """Kill it if it was asked to stop, and does not."""
        if self.stop_asked is not None and self.at_work and time.monotonic() - self.stop_asked > PATIENCE:
            self.process.kill()


class Jobs:
    """All that this server has started, by what it makes."""

    def __init__(self, folder: Path, start: Start = subprocess.Popen) -> None:
        self.folder, self._start = folder, start
        self._jobs: dict[tuple[str, str], Job] = {}
        self._lock = threading.Lock()

    def facts(self) -> list[JsonObject]:
        with self._lock:
            for job in self._jobs.values():
                job.tend()
                if not job.at_work:
                    with contextlib.suppress(OSError):  # a run that failed at once has left an empty folder
                        (self.folder / job.name).rmdir()
            return [job.facts() for job in self._jobs.values()]

    def start_run(self, study: Path, name: str | None = None) -> str:
        """Run a study into a new folder, and return the folder's name for a visitor."""
        with self._lock:
            self._check_room()
            out = self._new_folder(safe_name(study.stem) if name is None else name, exact=name is not None)
            self._launch("run", out, "run", str(study), "--out", str(out), "--quiet")
            return out.relative_to(self.folder).as_posix()

    def resume_run(self, run: Path) -> None:
        """Go on with a run that was stopped."""
        with self._lock:
            self._launch("run", run, "run", "--resume", "--out", str(run), "--quiet")

    def make_report(self, entry: Path) -> None:
        with self._lock:
            self._launch("report", entry, "report", str(entry))

    def stop(self, name: str) -> None:
        """Stop a run that this server has started; BadInput for others, which are not its to stop."""
        with self._lock:
            job = self._jobs.get(("run", name))
            if job is None or not job.at_work:
                raise BadInput(f"{name}: was not started from this page, or has ended; only what it started it stops")
            job.stop()

    def close(self) -> list[str]:
        """Stop everything; the names of the runs that were at work, which can be resumed."""
        with self._lock:
            working = [job for job in self._jobs.values() if job.at_work]
            for job in working:
                job.stop()
            for job in working:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.process.wait(PATIENCE)
                if job.at_work:
                    job.process.kill()
                    job.process.wait()
            return [job.name for job in working if job.kind == "run"]

    def _new_folder(self, name: str, *, exact: bool) -> Path:
        name = folder_name(name)
        home = self.folder if self.folder.name == "runs" else self.folder / "runs"
        if home.is_symlink():
            raise BadInput("runs: is a symbolic link, and nothing is written through one; serve the folder it leads to")
        home.mkdir(mode=0o700, exist_ok=True)
        for number in range(1, 1000):
            place = home / (name if number == 1 else f"{name}-{number}")
            with contextlib.suppress(FileExistsError):
                place.mkdir(mode=0o700)
                return place
            if exact:
                raise BadInput(f"{name}: there is a run of this name already; choose another name")
        raise BadInput(f"{name}: there are too many runs of this name; choose another one")

    def _check_room(self) -> None:
        if sum(job.at_work for job in self._jobs.values()) >= MOST_AT_ONCE:
            raise BadInput(f"{MOST_AT_ONCE} commands are at work already; wait for one of them, or stop it")

    def _launch(self, kind: str, place: Path, *arguments: str) -> None:
        name = place.relative_to(self.folder).as_posix()
        if (kind, name) in self._jobs and self._jobs[kind, name].at_work:
            raise BadInput(f"{name}: is at work already; wait for it, or stop it")
        self._check_room()
        logs = self.folder / LOGS
        logs.mkdir(mode=0o700, exist_ok=True)
        log = logs / f"{kind}-{name.replace('/', '_')}.log"
        # a session of its own: Ctrl-C in the terminal is for the server, which then stops what it has started
        own = {"start_new_session": True} if os.name != "nt" else {}
        command = [sys.executable, "-m", "polyclinic", *arguments]
        with log.open("w", encoding="utf-8") as output:
            process = self._start(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, **own)
        self._jobs[kind, name] = Job(kind, name, process, log)
