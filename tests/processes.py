"""Real processes that start at once: forked from one that has torch and polyclinic imported and nothing else done.

A process started from the command line spends seconds on imports. Those here are as real to the code under test
(own memory, own pipes, `kill -9`), and are there in a few hundredths of a second.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from polyclinic.engines.worker_process import WorkerProcess

_CONTEXT = multiprocessing.get_context("forkserver")
# torch._dynamo: what the first optimiser of a process would import
_CONTEXT.set_forkserver_preload(["polyclinic.run", "polyclinic.worker", "torch._dynamo"])


def start(function: Callable, *arguments: Any, **keywords: Any) -> multiprocessing.Process:
    process = _CONTEXT.Process(target=_silently, args=(function, arguments, keywords), daemon=True)
    process.start()
    return process


def _silently(function: Callable, arguments: tuple, keywords: dict[str, Any]) -> None:
    """Run with what it prints thrown away: a process that is to be killed may complain as it dies."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    function(*arguments, **keywords)


def begin(folder: Path) -> None:
    """Run the study that lies in a folder, from its start or its last checkpoint. For `start`."""
    from polyclinic.run import run

    run(None, folder, resume=True)


def kill(process: multiprocessing.Process) -> None:
    """`kill -9`, and wait until it is gone."""
    assert process.pid
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Wait until `condition()` is true and return it."""
    until = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.002)
    return value


class ForkedWorker(WorkerProcess):
    """A worker process of the engine that starts at once; `command` ends with the worker's order."""

    def __init__(self, command: list[str], *, threads: int, inherit: tuple[int, ...] = ()) -> None:
        read_calls, write_calls = os.pipe()
        read_answers, write_answers = os.pipe()
        process = start(_serve, command[-1], threads, DupFd(read_calls), DupFd(write_answers))
        os.close(read_calls)
        os.close(write_answers)
        os.set_blocking(write_calls, False)
        self._process = _Handle(process, write_calls, read_answers)  # type: ignore[assignment]


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


def _serve(order: str, threads: int, calls: DupFd, answers: DupFd) -> None:
    import torch

    from polyclinic.assembly import assemble_from
    from polyclinic.engines.worker_process import serve

    sys.stdin = os.fdopen(calls.detach(), "r")
    sys.stdout = os.fdopen(answers.detach(), "w")
    torch.set_num_threads(threads)
    serve(assemble_from(order).host())
