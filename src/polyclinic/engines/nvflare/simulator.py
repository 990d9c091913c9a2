"""NVFlare's simulator: a server and a process for each site, on this machine, without certificates."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from polyclinic.engines.nvflare.job import CLASSES
from polyclinic.engines.nvflare.process_tree import end_tree
from polyclinic.engines.worker_process import EXITS_WITHIN
from polyclinic.errors import BadInput, WorkFailed

#: the variable in the environment of the simulator's processes that tells them whose simulation they are
TOKEN = "POLYCLINIC_SIMULATION_TOKEN"


def site_names(sites: tuple[str, ...]) -> dict[str, str]:
    """The sites by the names that NVFlare can take for them: letters, digits, '-' and '_'."""
    names = {re.sub(r"[^A-Za-z0-9_-]", "-", site): site for site in sites}
    if len(names) < len(sites):
        raise BadInput("sites: NVFlare tells sites apart by letters, digits, '-' and '_' only; rename some of them")
    return names


def simulate(job: Path, workspace: Path, sites: list[str], *, watch: Callable[[], None], token: str) -> None:
    """Run a job to its end; `watch` is called now and then. WorkFailed if the simulator fails.

    `token` is what the simulator's processes find in their environment (`is_simulated`).

    The simulator's own folder is `workspace`; it is gone afterwards unless something went wrong.
    """
    refuse_missing()
    _allow_our_classes(workspace)
    log = workspace.with_name(f"{workspace.name}.log")
    command = [sys.executable, "-m", "nvflare.private.fed.app.simulator.simulator", str(job), "-w", str(workspace)]
    command += ["-c", ",".join(sites), "-t", str(len(sites)), "-m", str(len(sites))]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, TOKEN: token},
        )
        try:
            while process.poll() is None:
                watch()
                time.sleep(0.2)
        finally:
            end_tree(process.pid, patience=0)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(EXITS_WITHIN)
    if process.returncode:
        raise WorkFailed(f"NVFlare's simulator failed with exit code {process.returncode}; see {log} and {workspace}")
    watch()


def is_simulated(token: str) -> bool:
    """Whether this process was started by the simulator of the run that sends this token.

    A deployed site's process has no token, whatever an order says.
    """
    return bool(token) and hmac.compare_digest(os.environ.get(TOKEN, ""), token)


def _allow_our_classes(workspace: Path) -> None:
    shutil.rmtree(workspace, ignore_errors=True)
    local = workspace / "local"
    local.mkdir(parents=True)
    resources = {"format_version": 2, "class_allow_list": list(CLASSES)}
    (local / "resources.json.default").write_text(json.dumps(resources), encoding="utf-8")


def refuse_missing() -> None:
    """BadInput if NVFlare is not installed."""
    try:
        import nvflare  # noqa: F401
    except ImportError:
        raise BadInput("engine.name: 'nvflare' needs the extra: pip install 'polyclinic[nvflare]'") from None
