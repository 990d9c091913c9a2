"""A rehearsal of a deployment for tests: server and sites as processes of their own, ended whatever happens."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil

from polyclinic.cli import run_app
from polyclinic.deployment.processes import Rehearsal


@contextlib.contextmanager
def rehearsed(deployment: Path) -> Iterator[Path]:
    """Server and sites of a deployment folder, running."""
    started = run_app(["deploy", "up", "--here", "-d", str(deployment), "--within", "900"])
    running = list(Rehearsal(deployment).running().values())
    tree = [one for pid in running for one in (*psutil.Process(pid).children(recursive=True), psutil.Process(pid))]
    try:
        assert started == 0, (deployment / "server" / "console.log").read_text()[-2000:]
        yield deployment
    finally:
        run_app(["deploy", "down", "-d", str(deployment)])
        for process in tree:
            if process.is_running():
                process.kill()
