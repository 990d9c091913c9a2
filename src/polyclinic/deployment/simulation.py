"""A study in NVFlare's simulator: what the run's process starts, and what the simulator's processes do."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from polyclinic.assembly import Assembly, assemble_from
from polyclinic.engines.nvflare.engine import NVFlare, Patience, Send
from polyclinic.engines.nvflare.job import write_job
from polyclinic.engines.nvflare.simulator import end_with_parent, simulate, site_names
from polyclinic.engines.worker_process import reason_of
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.recorder import Display

OUTCOME = ".outcome.json"


@dataclass(frozen=True)
class WorkerOrder:
    """What a site's child process is told, and the threads it computes with."""

    order: str
    threads: int


# --- in the process that runs the study ---------------------------------------------------------------


def run_simulated(assembly: Assembly, lock: int, display: Display) -> dict[str, Any]:
    """Run a study in the simulator: what `result.json` will hold."""
    names = site_names(assembly.parts.names)
    workspace, outcome = assembly.folder / ".nvflare", assembly.folder / OUTCOME
    outcome.unlink(missing_ok=True)
    order = {"assembly": assembly.order, "names": names}
    display.started(assembly.study, assembly.parts.names, 1)
    follow = Follower(assembly.folder / "history.jsonl", assembly.study.method.rounds, display)
    with tempfile.TemporaryDirectory() as scratch:
        job = write_job(Path(scratch), "polyclinic", order=order, least=len(names))
        simulate(job, workspace, list(names), lock=lock, watch=follow.look)
    if not outcome.exists():
        raise WorkFailed(f"the simulation ended without a result; see {workspace}.log and {workspace}")
    values = _outcome(json.loads(outcome.read_text(encoding="utf-8")))
    outcome.unlink()
    shutil.rmtree(workspace, ignore_errors=True)
    workspace.with_name(f"{workspace.name}.log").unlink(missing_ok=True)
    return values


def _outcome(told: dict[str, Any]) -> dict[str, Any]:
    if told["error"] is None:
        return told["values"]
    raise BadInput(told["reason"]) if told["error"] == "BadInput" else WorkFailed(told["reason"])


class Follower:
    """Shows the rounds of a run in another process, by its history."""

    def __init__(self, history: Path, rounds: int, display: Display) -> None:
        self.history = history
        self.rounds = rounds
        self.display = display
        self._shown = _rounds_in(history)[-1]["round"] if _rounds_in(history) else 0

    def look(self) -> None:
        """Show what is new."""
        for line in _rounds_in(self.history):
            if line["round"] > self._shown:
                self._shown = line["round"]
                self.display.round_done(line, self.rounds)


def _rounds_in(history: Path) -> list[dict[str, Any]]:
    with contextlib.suppress(OSError, ValueError):
        return [json.loads(text) for text in history.read_text(encoding="utf-8").splitlines()]
    return []


# --- in the simulator's processes ---------------------------------------------------------------------


def coordinate(order: dict[str, Any], sends: Mapping[str, Send]) -> None:
    """The coordinator: runs the study with the sites that `sends` reaches, and leaves the outcome in its folder."""
    from polyclinic.run import run_with

    end_with_parent()
    assembly = assemble_from(order["assembly"])
    torch.set_num_threads(assembly.study.engine.threads)
    sites = {site: sends.get(name) for name, site in order["names"].items()}
    settings = assembly.study.engine
    patience = Patience(settings.deadline, settings.silence)
    engine = NVFlare(sites, patience=patience, simulation=True, durable=lambda: None)
    told: dict[str, Any] = {"error": None, "reason": None, "values": None}
    try:
        told["values"] = run_with(assembly, engine, Display())
    except Exception as error:
        told |= {"error": type(error).__name__, "reason": reason_of(error)}
    partial = assembly.folder / f"{OUTCOME}.partial"
    partial.write_text(json.dumps(told), encoding="utf-8")
    partial.replace(assembly.folder / OUTCOME)


def site_of(order: dict[str, Any], name: str) -> tuple[str, WorkerOrder]:
    """A simulated site's name, and what its child process is told."""
    end_with_parent()
    threads = json.loads(order["assembly"])["study"]["engine"]["threads"]
    return order["names"][name], WorkerOrder(order["assembly"], threads)
