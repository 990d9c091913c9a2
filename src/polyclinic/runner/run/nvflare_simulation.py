"""A run in NVFlare's simulator: what the run's own process does, and what the simulator's processes do."""

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from polyclinic.engines.nvflare.engine import NVFlare, Patience, Send
from polyclinic.engines.nvflare.job import end_with, simulate, site_names, write_job
from polyclinic.engines.nvflare.relay import Relay
from polyclinic.engines.worker_process import Outcome, WorkerProcess, python_command
from polyclinic.errors import WorkFailed
from polyclinic.run_folder import history_of, worker_lock
from polyclinic.runner.run.assembly import Assembly, assemble_from
from polyclinic.runner.run.recorder import Display

# --- in the process that runs the study ---------------------------------------------------------------


def run_simulated(assembly: Assembly, display: Display) -> dict[str, Any]:
    """Run a study in the simulator: what `result.json` will hold."""
    names = site_names(assembly.prepared.names)
    workspace, outcome = assembly.folder / ".nvflare", assembly.folder / ".outcome.json"
    outcome.unlink(missing_ok=True)
    follow = Follower(assembly.folder / "history.jsonl", assembly.study.method.rounds, display)
    display.started(assembly.study, assembly.prepared.names, follow.shown + 1)
    with tempfile.TemporaryDirectory() as scratch:
        token = secrets.token_hex(16)
        job_spec = {"assembly": assembly.worker_spec, "names": names, "run": os.getpid(), "token": token}
        job = write_job(Path(scratch), "polyclinic", spec=job_spec, least=len(names))
        simulate(job, workspace, list(names), watch=follow.look, token=token)
    if not outcome.exists():
        raise WorkFailed(f"the simulation ended without a result; see {workspace}.log and {workspace}")
    values = Outcome.read(outcome).result()
    outcome.unlink()
    shutil.rmtree(workspace, ignore_errors=True)
    workspace.with_name(f"{workspace.name}.log").unlink(missing_ok=True)
    return values


class Follower:
    """Shows the rounds of a run in another process, by its history."""

    def __init__(self, history: Path, rounds: int, display: Display) -> None:
        self.history = history
        self.rounds = rounds
        self.display = display
        self.shown = max((line["round"] for line in self._lines()), default=0)

    def look(self) -> None:
        """Show what is new."""
        for line in self._lines():
            if line["round"] > self.shown:
                self.shown = line["round"]
                self.display.round_done(line, self.rounds)

    def _lines(self) -> list[dict[str, Any]]:
        return history_of(self.history.read_text(encoding="utf-8")) if self.history.exists() else []


# --- in the simulator's processes ---------------------------------------------------------------------


def coordinate_simulation(job_spec: dict[str, Any], sends: Mapping[str, Send]) -> None:
    """The coordinator: runs the study with the sites that `sends` reaches, and leaves the outcome in its folder."""
    from polyclinic.runner.run.run import run_with

    assembly = assemble_from(job_spec["assembly"])
    with worker_lock(assembly.folder):  # first the lock: a run killed from now on leaves it behind, and is not missed
        end_with(job_spec["run"])
        settings = assembly.study.engine
        torch.set_num_threads(settings.threads)
        sites = {site: sends.get(name) for name, site in job_spec["names"].items()}
        patience = Patience(settings.deadline, settings.silence)
        engine = NVFlare(sites, patience=patience, simulation=True, durable=lambda: None)
        outcome = Outcome.of(lambda: run_with(assembly, engine, Display()))
        outcome.write(assembly.folder / ".outcome.json")


def relay_of_simulated_site(job_spec: dict[str, Any], name: str) -> Relay:
    """The relay of a simulated site."""
    end_with(os.getppid())
    threads = json.loads(job_spec["assembly"])["study"]["engine"]["threads"]
    command, spec = python_command("polyclinic.runner.run.worker"), job_spec["assembly"]
    return Relay(job_spec["names"][name], lambda: WorkerProcess(command, threads=threads, spec=spec))
