"""Ending a process together with all that it started (its process tree)."""

from __future__ import annotations

import contextlib


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
    psutil.wait_procs(left, timeout=5)
