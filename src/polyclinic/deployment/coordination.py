"""The coordinator of a deployed run, at its server: runs the study, tells its status, lets lost sites rejoin.

NVFlare gives a job the sites that are connected when it starts. When one that was lost is back, the job ends at the
next checkpoint and says so; the run goes on, with that site, in the next job.
"""

import contextlib
import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from polyclinic.data.allowed_paths import folder_name
from polyclinic.data.own_images import load_site_plugins
from polyclinic.data.parts import PreparedSites
from polyclinic.data.source import AtSites
from polyclinic.deployment.approval import TOLD
from polyclinic.engines.nvflare.engine import NVFlare, Patience, Send
from polyclinic.engines.worker_process import Outcome
from polyclinic.errors import BadInput, RunPaused, WorkFailed
from polyclinic.federation.call import pack, unpack
from polyclinic.federation.ledger.keys import KeyRing, KitKeys
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.ledger import LedgerBroken
from polyclinic.federation.ledger.verify import witnesses_in
from polyclinic.files import PARTIAL, atomic_write
from polyclinic.run_folder import LOCK, WORKERS, run_lock, write_result, write_run_format
from polyclinic.runner.run.assembly import Assembly
from polyclinic.runner.run.recorder import Display
from polyclinic.study import Study, load_run_study, parse_study

#: what a run folder at the server holds that its owner need not fetch
NOT_FETCHED = shutil.ignore_patterns("checkpoint", LOCK, WORKERS, f"*{PARTIAL}")
OUTCOME = "outcome.json"
#: seconds between questions to sites whose approval is missing
ASK_AGAIN = 2.0
STOPPED = "the run was stopped by its owner (deploy stop)"


class Rejoining(RunPaused):
    """A site that was lost is back: the run goes on, with it, in another job."""


class Stopped(RunPaused):
    """The run's owner has stopped it."""


@dataclass(frozen=True)
class Reach:
    """How the coordinator reaches its sites: `sends` those in this job, `present` whether one is connected at all."""

    sends: Mapping[str, Send]
    present: Callable[[str], bool]


def in_words(approvals: Mapping[str, str]) -> list[str]:
    """Which sites do not let a study run (yet), a sentence each."""
    return [f"{site}: the study {TOLD.get(state, state)}" for site, state in approvals.items()]


def coordinate(job_spec: dict[str, Any], reach: Reach, kit: Path, job: Path) -> "Coordination":
    """Prepare the run that a job is for. `kit` is the server's folder, `job` the one that its owner can fetch."""
    run = folder_name(job_spec["run"])
    load_site_plugins(kit / "local" / "site.toml")  # the server's people list theirs, too
    folder, keys = kit / "runs" / run, KitKeys(kit / "local")
    return Coordination(parse_study(job_spec["study"]), folder, job_spec["resume"], reach, job, keys)


def ends_of_ledgers(runs: Path) -> dict[str, dict[str, Any]]:
    """How far each site's ledger had come in each run here, as the site signed it: by site and run. A site that put a
    backup back finds by this that its ledgers went back, too."""
    found: dict[str, dict[str, Any]] = {}
    for folder in sorted(path for path in runs.glob("*") if path.is_dir()):
        with contextlib.suppress(BadInput, LedgerBroken):  # of a damaged run nothing is known
            for one in witnesses_in(folder):
                known, end = found.setdefault(one.site, {}), one.anchor.head
                if folder.name not in known or known[folder.name][0] < end.lines:
                    known[folder.name] = list(end)
    return found


class Coordination:
    """One run at the server."""

    def __init__(
        self, study: Study, folder: Path, resume: bool, reach: Reach, job: Path, keys: KeyRing | None = None
    ) -> None:
        """`keys` are those of the server's kit: they check and counter-sign the heads of the sites' ledgers."""
        self.study = study
        self.folder = folder
        self.resume = resume
        self.reach = reach
        self.job = job
        self.keys = keys
        self.engine: NVFlare | None = None
        self._stopping = threading.Event()
        self._approvals: dict[str, str] = {}  # of the sites that do not let the study run (yet)
        self._seen: dict[str, dict[str, Any]] = {}  # ends of their ledgers in all runs of this server

    def run(self) -> Outcome:
        """Run to the end, or to where a site rejoins; leave what may be fetched in the job's folder."""
        outcome = Outcome.of(self._run)
        if outcome.error and self._stopping.is_set():  # whatever its sites said while NVFlare ended the job there
            outcome = Outcome(Stopped.__name__, STOPPED)
        self.folder.mkdir(parents=True, exist_ok=True)
        outcome.write(self.folder / OUTCOME)
        shutil.copytree(self.folder, self.job / "run", ignore=NOT_FETCHED, dirs_exist_ok=True)
        return outcome

    def status(self) -> dict[str, Any]:
        """How far the run is, for `polyclinic deploy status`."""
        history = self.folder / "history.jsonl"
        lines = history.read_text(encoding="utf-8").splitlines() if history.exists() else []
        last = json.loads(lines[-1]) if lines else {}
        lost = sorted(self.engine.lost) if self.engine else []
        failed = last.get("failed", {}).items()
        stopped = {site: state for site, reason in failed for state, told in TOLD.items() if reason.endswith(told)}
        told = {"lost": lost, "last": last, "approvals": self._approvals | stopped}
        return {"run": self.folder.name, "rounds": self.study.method.rounds, **told}

    def stop(self) -> dict[str, Any]:
        """Have the run stop at its next checkpoint; how far it is.

        The outcome is written at once: a job that is aborted meanwhile must not look as if it had been lost.
        """
        self._stopping.set()
        (self.job / "run").mkdir(parents=True, exist_ok=True)
        Outcome(Stopped.__name__, STOPPED).write(self.job / "run" / OUTCOME)
        return self.status()

    def leaves(self, site: str) -> None:
        """A site says that it is being stopped."""
        if self.engine and site in self.reach.sends:
            self.engine.leaves(site)

    def _run(self) -> dict[str, Any]:
        from polyclinic.runner.run.run import check_same, run_with
        from polyclinic.study.reading import note_plugins

        study, begun = self.study, self.folder / "study.toml"
        if not isinstance(study.data, AtSites):
            raise BadInput("data.source: a deployed study has no data of its own; it must be 'at-sites'")
        if begun.exists() and not self.resume:
            raise BadInput(f"--name {self.folder.name}: holds a run already; add --resume, or take another name")
        if begun.exists():
            check_same(load_run_study(self.folder), study, self.folder)
        names = study.sites.site_names()
        torch.set_num_threads(study.engine.threads)
        prepared = PreparedSites(self.folder, names, study.data.info(names))
        assembly = Assembly(study, prepared, self.folder, keys=self.keys)
        sites = {site: self.reach.sends.get(site) for site in names}
        patience = Patience(study.engine.deadline, study.engine.silence)
        self.engine = NVFlare(sites, patience=patience, simulation=False, durable=self._make_room)
        with run_lock(self.folder):
            write_run_format(self.folder)
            note_plugins(self.folder, study)
            assembly.note_weights()
            atomic_write(begun, study.to_toml())
            self._seen = ends_of_ledgers(self.folder.parent)
            self._await_approval(names)
            values = run_with(assembly, self.engine, Display())
            write_result(self.folder, values)
        return values

    def _await_approval(self, names: Sequence[str]) -> None:
        """Wait until nobody's approval is missing, or for `engine.approval_wait` seconds; WorkFailed if there are fewer
        sites than the quorum then. One that approves later joins the round that runs then."""
        until = time.monotonic() + self.study.engine.approval_wait
        while True:
            states = {site: self._approval_at(site) for site in names}
            self._approvals = {site: state for site, state in states.items() if state in TOLD}
            if "waiting" not in self._approvals.values() or time.monotonic() >= until:
                break
            if self._stopping.wait(ASK_AGAIN):
                raise Stopped(STOPPED)
        if len(names) - len(self._approvals) < math.ceil(self.study.engine.quorum * len(names) - 1e-9):
            told = "; ".join(in_words(self._approvals))
            raise WorkFailed(f"too few sites let the study run ({told}); their people decide with `polyclinic site`")

    def _approval_at(self, site: str) -> str:
        """What a site says about the study's approval; "unknown" if it is absent or cannot take part."""
        send = self.reach.sends.get(site)
        if send is None:
            return "unknown"
        try:
            asked = pack({"seen": self._seen.get(site, {})}, [])
            return str(unpack(send("ping", asked, self.study.engine.silence))[0].get("approval", "unknown"))
        except (TimeoutError, RuntimeError, ParcelRejected):
            return "unknown"

    def _make_room(self) -> None:
        """At a checkpoint: Stopped if the owner said so; Rejoining if a lost site is connected again, and a further
        round could have it."""
        if self._stopping.is_set():
            raise Stopped(STOPPED)
        back = [site for site in sorted(self.engine.lost if self.engine else ()) if self.reach.present(site)]
        if back:
            raise Rejoining(f"{', '.join(back)}: back again")
