"""Real processes that start at once: forked from one that has torch and polyclinic imported and nothing else done.

A process started from the command line spends seconds on imports. Those here are as real to the code under test
(own memory, own pipes, `kill -9`), and are there in a few hundredths of a second.
"""

import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from polyclinic.engines.worker_process import WorkerProcess

_CONTEXT = multiprocessing.get_context("forkserver")
# also what a run imports only at its end, and what tests import: each process would import it again
_CONTEXT.set_forkserver_preload(
    ["polyclinic.runner.run.run", "polyclinic.runner.run.engines", "scipy.optimize", "scipy.stats", "sympy", "conftest"]
)


def idle_host():
    """A host for an engine whose sites all live in workers: it is never asked for anything."""
    return SimpleNamespace(by_reference=False, settle=lambda: None)


def start(function: Callable, *arguments: Any, **keywords: Any) -> multiprocessing.Process:
    """A process that ends with this one, and so may not start others by `multiprocessing`."""
    process = _CONTEXT.Process(target=function, args=arguments, kwargs=keywords, daemon=True)
    process.start()
    return process


def begin(folder: Path, die_at: int = 0, midway: bool = False) -> None:
    """Run the study that lies in a folder, from its start or its last checkpoint. For `start`.

    With `die_at` the process kills itself (SIGKILL) at its so-manieth change to a file of the folder: just before
    it, or `midway`, when a file that is written anew is empty and one that is added to ends in half a line.
    """
    from polyclinic.runner.run.run import run

    changes = watch_changes(folder, die_at, midway)
    run(None, folder, resume=True)
    (folder.parent / f"{folder.name}.changes").write_text("\n".join(changes))


def watch_changes(folder: Path, die_at: int, midway: bool) -> list[str]:
    """From now on every change to a file of the folder is noted, as "event name", before it happens."""
    changes: list[str] = []

    def watch(event: str, arguments: tuple) -> None:
        if event not in ("open", "os.rename", "os.remove", "os.truncate", "os.mkdir"):
            return
        mode = arguments[1] if event == "open" else ""
        if event == "open" and not (isinstance(mode, str) and set(mode) & set("wax+")):
            return
        name = str(arguments[1 if event == "os.rename" else 0])
        if not name.startswith(f"{folder}/"):
            return
        changes.append(f"{event} {name.removeprefix(f'{folder}/')}")
        if len(changes) == die_at:
            if midway and mode:
                _half_done(name, mode)
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)  # for the life of the process
    return changes


def _half_done(name: str, mode: str) -> None:
    file = os.open(name, os.O_WRONLY | os.O_CREAT | (os.O_APPEND if "a" in mode else os.O_TRUNC))
    os.write(file, b'{"index": 3, "previous": "00' if "a" in mode else b"")
    os.close(file)


def run_command(*arguments: Any) -> subprocess.CompletedProcess:
    """`polyclinic arguments...` in a process of its own, imports and all; its output and errors as text."""
    command = [sys.executable, "-m", "polyclinic", *map(str, arguments)]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


def polyclinic(*arguments: Any) -> str:
    """What `polyclinic arguments...` prints; it must not fail."""
    done = run_command(*arguments)
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def start_polyclinic(*arguments: Any) -> subprocess.Popen:
    """`polyclinic arguments...`, while this process goes on."""
    command = [sys.executable, "-m", "polyclinic", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def kill(process: multiprocessing.Process) -> None:
    """`kill -9`, and wait until it is gone."""
    process.kill()
    process.join()


def stop(pid: int) -> None:
    """SIGSTOP, and wait until all its threads stand still: until then one of them may notice what happens next."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    if threads.exists():
        wait_for(lambda: all(") T " in (thread / "stat").read_text() for thread in threads.iterdir()))


def wait_for(condition: Callable[[], Any]) -> Any:
    """Wait until `condition()` is true and return it. How long that takes is the machine's business: where it never
    comes true, pytest's own timeout ends the test."""
    while not (value := condition()):
        time.sleep(0.002)
    return value


def run_script(script: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """`python script arguments...` in a process that starts at once, as `subprocess.run` would give it."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        files = DupFd(out.fileno()), DupFd(err.fileno())
        process = _CONTEXT.Process(target=_run_script, args=(str(script), arguments, environment, *files))
        process.start()
        process.join()
        texts = [file.seek(0) or file.read() for file in (out, err)]
    return subprocess.CompletedProcess([str(script), *arguments], process.exitcode or 0, *texts)


def _run_script(script: str, arguments: tuple, environment: dict[str, str], out: DupFd, err: DupFd) -> None:
    import torch

    for number, file in ((1, out), (2, err)):  # for the processes that it starts, too
        os.dup2(file.detach(), number)
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


class ForkedProgram:
    """`polyclinic ...` in a process that starts at once, with what is needed of subprocess.Popen; its output and its
    errors go to the file `stdout`."""

    def __init__(self, command: list[str], *, stdout: Any, **_: Any) -> None:
        self._process = start(_run_program, command[command.index("polyclinic") + 1 :], DupFd(stdout.fileno()))
        self.pid = self._process.pid
        self.terminate = self._process.terminate

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode


def _run_program(arguments: list[str], output: DupFd) -> None:
    from polyclinic.cli import run_app

    sys.stdout = sys.stderr = os.fdopen(output.detach(), "w")
    sys.exit(run_app(arguments))


class ForkedWorker(WorkerProcess):
    """A worker process, of an engine or a deployed site, that starts at once; `command` ends with its module."""

    def _start(self, command: list[str], threads: int) -> Any:
        read_calls, write_calls = os.pipe()
        read_answers, write_answers = os.pipe()
        process = start(_serve, command[-1], threads, DupFd(read_calls), DupFd(write_answers))
        os.close(read_calls)
        os.close(write_answers)
        return _Handle(process, write_calls, read_answers)


class _Handle:
    """What WorkerProcess needs of subprocess.Popen."""

    def __init__(self, process: multiprocessing.Process, stdin: int, stdout: int) -> None:
        self.process = process
        self.pid = process.pid
        self.stdin = os.fdopen(stdin, "wb", buffering=0)
        self.stdout = os.fdopen(stdout, "rb", buffering=0)

    def kill(self) -> None:
        self.process.kill()

    def wait(self, timeout: float | None = None) -> int | None:
        self.process.join(timeout)
        return self.process.exitcode


def _serve(module: str, threads: int, calls: DupFd, answers: DupFd) -> None:
    import torch

    sys.stdin = os.fdopen(calls.detach(), "r")
    sys.stdout = os.fdopen(answers.detach(), "w")
    torch.set_num_threads(threads)
    runpy.run_module(module, run_name="__main__")
