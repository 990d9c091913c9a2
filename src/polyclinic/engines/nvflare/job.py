"""NVFlare's jobs and the processes that run them: the job of a run, the simulator, processes that end together.

A job has two components of the installed package, and no code of its own: it needs no right to "bring your own code" at
a site, which runs what it has installed, nothing else.
"""

import base64
import contextlib
import hmac
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from polyclinic.engines.worker_process import EXITS_WITHIN
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.json_types import JsonObject

COORDINATOR = "polyclinic.deployment.programs.Coordinator"
SITE = "polyclinic.deployment.programs.SiteProgram"
#: everything that a polyclinic job has NVFlare build: the classes that a site must allow, and needs to allow
CLASSES = (
    "nvflare.collab.runtime.controller.CollabController",
    "nvflare.collab.runtime.executor.CollabExecutor",
    COORDINATOR,
    SITE,
)
#: the property of a job that holds what coordinator and sites are to do
SPEC = "job_spec"
#: what the coordinator of a running job answers with how far it is
STATUS = "polyclinic.status"
#: what makes the coordinator of a running job stop after the round it is in
STOP = "polyclinic.stop"
#: seconds for the sites to start their part of a job
JOIN = 600


def write_job(folder: Path, name: str, *, spec: JsonObject, least: int) -> Path:
    """A job folder `folder`/`name`; `spec` goes to the coordinator and to every site, `least` sites must be there."""
    config = folder / name / "app" / "config"
    config.mkdir(parents=True)
    properties = {SPEC: encode_property(spec)}
    meta = {"name": name, "resource_spec": {}, "min_clients": least, "deploy_map": {"app": ["@ALL"]}}
    controller = {"server_obj_id": "program", "props": properties, "sync_task_timeout": JOIN}
    server = {"workflows": [{"id": "controller", "path": CLASSES[0], "args": controller}]}
    server["components"] = [{"id": "program", "path": COORDINATOR, "args": {}}]
    executor = {"path": CLASSES[1], "args": {"client_obj_id": "program", "props": properties}}
    client = {"executors": [{"tasks": ["*"], "executor": executor}]}
    client["components"] = [{"id": "program", "path": SITE, "args": {}}]
    _write(folder / name / "meta.json", meta)
    _write(config / "config_fed_server.json", {"format_version": 2, **server})
    _write(config / "config_fed_client.json", {"format_version": 2, **client})
    return folder / name


def encode_property(values: JsonObject) -> str:
    """Plain values as letters and digits: NVFlare takes braces in a setting for names of variables."""
    return base64.b64encode(json.dumps(values).encode()).decode()


def decode_property(text: str) -> JsonObject:
    """What `encode_property` was given."""
    return json.loads(base64.b64decode(text))


def _write(path: Path, values: JsonObject) -> None:
    path.write_text(json.dumps(values, indent=1), encoding="utf-8")


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
    shutil.rmtree(workspace, ignore_errors=True)
    (workspace / "local").mkdir(parents=True)
    _write(workspace / "local" / "resources.json.default", {"format_version": 2, "class_allow_list": list(CLASSES)})
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


def refuse_missing() -> None:
    """BadInput if NVFlare is not installed."""
    try:
        import nvflare  # noqa: F401
    except ImportError:
        raise BadInput("engine.name: 'nvflare' needs the extra: pip install 'polyclinic[nvflare]'") from None


#: seconds between looks at the process that this one ends with
LOOK = 0.2
#: seconds that children have to end with their parent, by themselves: a site's job says goodbye to the coordinator
GOODBYE = 4.0


def end_tree(*pids: int, patience: float = 20.0) -> None:
    """Ask processes to end, then their children, and kill what is left of them after `patience` seconds.

    Without patience (0) all are killed at once. Children may lie in sessions of their own, so they are found by parent.
    """
    import psutil

    def terminate(process: psutil.Process) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()

    tree: list[psutil.Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            tree += [*process.children(recursive=True), process]
            if patience:
                terminate(process)
    left = psutil.wait_procs(tree, timeout=min(GOODBYE, patience))[1] if patience else tree
    for process in left if patience else []:
        terminate(process)
    left = psutil.wait_procs(left, timeout=patience)[1] if patience else tree
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=60)


def end_with(pid: int, leave: Callable[[], None] = lambda: None) -> None:
    """From now on, end this process at once when process `pid` is gone, after a call of `leave`; now, if it is gone
    already.

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
        try:
            leave()
        finally:
            os._exit(1)

    try:
        other = psutil.Process(pid)
    except psutil.NoSuchProcess:
        os._exit(1)
    threading.Thread(target=watch, daemon=True).start()
