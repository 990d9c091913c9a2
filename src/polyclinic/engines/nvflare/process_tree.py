"""Processes that end together: a process with all that it started (its process tree), this process with another one."""

from __future__ import annotations

import contextlib
import os
import threading
import time

#: seconds between looks at the process that this one ends with
LOOK = 0.2


def end_tree(*pids: int, patience: float = 20.0) -> None:
    """Ask processes to end, and kill what is left of them and of their children after `patience` seconds.

    Without patience (0) all are killed at once. Children may lie in sessions of their own, so they are found by parent.
    """
    import psutil

    tree: list[psutil.Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            tree += [*process.children(recursive=True), process]
            if patience:
                process.terminate()
    left = psutil.wait_procs(tree, timeout=patience)[1] if patience else tree
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=60)


def end_with(pid: int) -> None:
    """From now on, end this process at once when process `pid` is gone; now, if it is gone already.

    A process that was killed cannot end those that it started: they watch for that themselves.
    """
    import psutil

    def gone() -> bool:
        try:
            return not other.is_running() or other.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def watch() -> None:
        while not gone():
            time.sleep(LOOK)
        os._exit(1)

    try:
        other = psutil.Process(pid)
    except psutil.NoSuchProcess:
        os._exit(1)
    threading.Thread(target=watch, daemon=True).start()
