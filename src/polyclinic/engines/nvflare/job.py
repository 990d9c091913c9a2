"""The NVFlare job of a run: two components of the installed package, and no code of its own.

A job without code needs no right to "bring your own code" at a site: sites run what they have installed, nothing else.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

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
