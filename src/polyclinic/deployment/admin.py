"""The owner's side of a deployment: submits a study, watches over it, stops and fetches it, with the admin's kit.

NVFlare ends a job when a site's process for it is killed, and gives a running job no site that comes later. `submit`
therefore watches over its run and submits it again, from its last checkpoint, whenever that is what it takes.
"""

import contextlib
import io
import logging
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from polyclinic import __version__
from polyclinic.data.source import AtSites
from polyclinic.deployment.coordination import OUTCOME, STOPPED, in_words
from polyclinic.deployment.kits import ADMIN
from polyclinic.engines.nvflare.job import STATUS, STOP, write_job
from polyclinic.engines.worker_process import Outcome
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.json_types import JsonObject
from polyclinic.models import PUBLIC, RANDOM, read_weights
from polyclinic.runner.run.recorder import Display
from polyclinic.study import Study, load_study, parse_study

T = TypeVar("T")
#: seconds between looks at a running job
LOOK = 2.0
#: seconds that a server which was there has to come back, while somebody watches over a run
SERVER_WAIT = 900.0
#: seconds by which a site is later than the latest one, after which it counts as lost: sites tell every few seconds
SILENT = 60.0
#: seconds within which a site that is there tells something, several times: NVFlare's heartbeat comes every ten
TELLS = 25.0
#: why a run stops that goes on in another job
GOES_ON = ("Rejoining", "JobEnded")
#: times in a row that a run is submitted again without having finished another round
ATTEMPTS = 3


class ServerGone(WorkFailed):
    """No server answers."""


@dataclass(frozen=True)
class Submission:
    """A study to run, under a name, at a server: from its beginning, or from where it stopped."""

    study: Study
    name: str
    resume: bool = False

    def job_spec(self) -> JsonObject:
        tables = self.study.as_tables()
        if self.study.plugins:  # their names only: where they lie here is nobody's business
            tables["plugins"] = [Path(name).name for name in self.study.plugins]
        return {"study": tables, "run": self.name, "resume": self.resume, "version": __version__}

    @property
    def least(self) -> int:
        """Sites without which the run cannot go on."""
        count = len(self.study.sites.site_names())
        return max(1, math.ceil(self.study.engine.quorum * count - 1e-9))


class Administration:
    """The server, as the admin's kit reaches it."""

    def __init__(self, folder: Path, within: float = 30.0) -> None:
        self.kit = folder / "admin"
        self.within = within
        self._server: Any = None
        if not (self.kit / "startup" / "fed_admin.json").is_file():
            raise BadInput(f"{folder}: is no deployment with an admin's kit; `polyclinic deploy init` makes one")

    def __enter__(self) -> "Administration":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def connected(self) -> list[str]:
        """Names of the sites that are connected now."""
        return sorted(site for site, silence in self.silences().items() if silence < SILENT)

    def silences(self, *, patient: bool = False) -> dict[str, float]:
        """Seconds since each site that the server knows was last heard of.

        NVFlare lists a site for ten minutes after it was lost. The server alone has noted the times, so that clocks
        that differ from its own do not matter; the latest site stands for the present. `patient`: looks a second time
        where this machine's clock says that nobody was heard of lately: all sites may be lost.
        """
        heard = self._heard()
        latest = present = max(heard.values(), default=0.0)
        if patient and heard and not 0 <= time.time() - latest < SILENT:
            time.sleep(TELLS)
            heard = self._heard()
            present = max(heard.values(), default=0.0)
            if present == latest:  # the clocks do not differ, or not only: no site has told anything
                present += max(SILENT, time.time() - latest)
        return {site: present - moment for site, moment in heard.items()}

    def _heard(self) -> dict[str, float]:
        """When the server last heard of each site, by its clock; one that has just come was heard of now."""
        known = self._ask(lambda server: server.get_system_info()).client_info
        moments = {client.name: client.last_connect_time for client in known}
        latest = max((moment for moment in moments.values() if moment is not None), default=0.0)
        return {site: latest if moment is None else moment for site, moment in moments.items()}

    def begun(self) -> float | None:
        """When the server was started, by its clock."""
        return self._ask(lambda server: server.get_system_info()).server_info.start_time

    def jobs(self) -> list[JsonObject]:
        """All jobs, the latest first."""
        return self._ask(lambda server: server.list_jobs(reverse=True))

    def progress(self, job: str) -> JsonObject | None:
        """How far a running job is, as its coordinator says; None if it does not answer (yet)."""
        with contextlib.suppress(WorkFailed):
            return self._ask(lambda server: server.do_app_command(job, STATUS, {}), attempts=1)
        return None

    def submit(self, submission: Submission) -> str:
        """Submit a run; the job's number."""
        with tempfile.TemporaryDirectory() as scratch:
            job = write_job(Path(scratch), "polyclinic", spec=submission.job_spec(), least=submission.least)
            self._ask(lambda server: server.get_system_info())  # so that what follows finds the server and is done once
            return self._ask(lambda server: server.submit_job(str(job)), attempts=1)

    def status(self, job: str) -> str:
        return self._ask(lambda server: server.get_job_status(job))

    def stop(self, job: str, *, now: bool = False) -> bool:
        """Stop a run after the round it is in; True if it stops at once instead: `now`, or before its first round."""
        at_once = now
        try:
            self._ask(lambda server: server.do_app_command(job, STOP, {}), attempts=1)
        except WorkFailed:  # it is not running yet, or its coordinator is lost
            at_once = True
        if at_once:
            self._ask(lambda server: server.abort_job(job))
        return at_once

    def revoke_site(self, site: str) -> list[str]:
        """Refuse a site from now on, also after a restart of the server; the jobs that were stopped for it.

        NVFlare leaves a running job the sites that it began with: so every running job is stopped at once.
        """
        self._ask(lambda server: server.disable_client(site))
        stopped = [one["job_id"] for one in self.jobs() if not one["status"].startswith("FINISHED")]
        for job in stopped:
            self.stop(job, now=True)
        return stopped

    def fetch(self, job: str, target: Path) -> Path:
        """What a job has left to be fetched, put into a new folder, and the log of its coordinator."""
        with tempfile.TemporaryDirectory() as scratch:
            location = Path(self._ask(lambda server: server.download_job_result(job, scratch)))
            found = next(iter(location.rglob(OUTCOME)), None)
            if found is None:
                raise WorkFailed(f"job {job} left nothing to fetch; `polyclinic deploy logs server` may say why")
            shutil.copytree(found.parent, target, dirs_exist_ok=True)
            if (log := found.parent.parent / "log.txt").is_file():
                shutil.copy(log, target / "server.log")
        return target

    def close(self) -> None:
        with contextlib.suppress(Exception):
            if self._server is not None:
                self._server.close()
        self._server = None

    def _ask(self, question: Callable[[Any], T], attempts: int = 2) -> T:
        """An answer of the server; a connection that broke is made again."""
        for attempt in range(1, attempts + 1):
            server = self._server or self._connect()
            try:
                with silenced():  # it tells its user what it tells its caller
                    return question(server)
            except Exception as error:
                self.close()
                if attempt == attempts:
                    raise WorkFailed(f"the server refused: {_words(error)}") from None
        raise AssertionError

    def _connect(self) -> Any:
        from nvflare.fuel.flare_api.flare_api import new_secure_session

        logging.getLogger("nvflare").setLevel(logging.CRITICAL)  # a server that is down is one sentence, below
        try:
            with silenced():
                self._server = new_secure_session(ADMIN, str(self.kit), timeout=self.within)
        except Exception as error:
            raise ServerGone(f"no server answers within {self.within:g} seconds (--within): {_words(error)}") from None
        return self._server

    def outcome(self, job: str) -> Outcome | None:
        """How a job that has ended says it ended; None if it was killed before it could."""
        with tempfile.TemporaryDirectory() as scratch, contextlib.suppress(WorkFailed):
            return Outcome.read(self.fetch(job, Path(scratch) / "run") / OUTCOME)
        return None


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """NVFlare says nothing: neither what it tells its caller as well, nor tracebacks of failures that it gets over."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _words(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class Watch:
    """Watches over a run until it is finished: submits it again when a site is back or a job was lost."""

    def __init__(self, administration: Administration, display: Display, say: Callable[[str], None]) -> None:
        self.administration = administration
        self.display = display
        self.say = say
        self._round = 0
        self._waiting: dict[str, str] = {}
        self._lost: list[str] = []
        self._server_begun: float | None = None

    def run(self, submission: Submission, job: str) -> JsonObject:
        """The result of the run; WorkFailed or BadInput if there is none."""
        self.display.started(submission.study, submission.study.sites.site_names(), 1)
        attempts, before, self._server_begun = 0, 0, self._begun()
        while True:
            if self._follow(submission, job) == "cancelled":
                raise WorkFailed(STOPPED)
            outcome = self.administration.outcome(job)
            if outcome is not None and outcome.error not in GOES_ON:
                return outcome.result()
            attempts, before = (0 if self._round > before else attempts + 1), self._round
            if attempts >= ATTEMPTS:
                raise WorkFailed(f"the run stopped {ATTEMPTS} times in a row; `polyclinic deploy logs server` says why")
            self.say(outcome.reason if outcome and outcome.reason else f"job {job} was lost")
            submission = Submission(submission.study, submission.name, resume=True)
            self._server_begun = self._begun()  # before: a restart after it is noticed
            job = self.administration.submit(submission)
            self.say(f"going on after round {self._round} as job {job}")

    def _follow(self, submission: Submission, job: str) -> Literal["ended", "cancelled"]:
        """Until the job has ended, show its rounds; "cancelled": it was aborted before it ran."""
        has_run = False
        patient_until: float | None = time.monotonic() + 15 * LOOK
        while not (status := self._status(job)).startswith("FINISHED"):
            if status == "SUBMITTED" and patient_until is not None and time.monotonic() > patient_until:
                connected = ", ".join(self.administration.connected()) or "nobody"
                self.say(f"waiting for {submission.least} sites to be connected; now there is {connected}")
                patient_until = None
            has_run |= status == "RUNNING"
            progress = self.administration.progress(job) if status == "RUNNING" else None
            if status == "RUNNING" and progress is None and self._is_restarted(job):
                return "ended"
            approvals = (progress or {}).get("approvals") or {}
            if approvals and approvals != self._waiting:  # told once
                self.say("; ".join(in_words(approvals)))
            self._waiting = approvals
            self._say_who_is_lost((progress or {}).get("lost", self._lost))
            last = (progress or {}).get("last") or {}
            if last.get("round", 0) > self._round:
                self._round = last["round"]
                self.display.round_done(last, submission.study.method.rounds)
            time.sleep(LOOK)
        return "cancelled" if status == "FINISHED:ABORTED" and not has_run else "ended"

    def _is_restarted(self, job: str) -> bool:
        """Whether the server is another process than the one that began the job: it does not run the job any more, and
        yet it may call it running for ever."""
        begun = self._begun()
        if begun is None:  # it is gone, and will be waited for
            return False
        if self._server_begun in (None, begun):
            self._server_begun = begun
            return False
        self.say("the server is back, and was restarted")
        with contextlib.suppress(WorkFailed):
            self.administration.stop(job, now=True)
        return True

    def _begun(self) -> float | None:
        with contextlib.suppress(WorkFailed):
            return self.administration.begun()
        return None

    def _status(self, job: str) -> str:
        """The status of a job; a server that is gone is waited for."""
        until: float | None = None
        while True:
            try:
                status = self.administration.status(job)
            except ServerGone as error:
                if until is None:
                    until = time.monotonic() + SERVER_WAIT
                    self.say(f"{error}; it has {SERVER_WAIT / 60:g} minutes to come back")
                elif time.monotonic() > until:
                    raise
                time.sleep(LOOK)
                continue
            if until is not None:
                self.say("the server is back")
            return status

    def _say_who_is_lost(self, lost: list[str]) -> None:
        """Tell once which sites the run goes on without."""
        if lost != self._lost:
            self.say(f"lost: {', '.join(lost)}" if lost else "no site is lost any more")
        self._lost = lost


def study_to_send(path: Path, sets: list[str], folder: Path) -> Study:
    """A study without data of its own; one that was rehearsed gets what `deploy init` found out about its images."""
    study = with_digest_of_weights(load_study(path, sets))
    if isinstance(study.data, AtSites):
        return study
    if not (folder / "study.toml").is_file():
        raise BadInput(f"{folder}: is no deployment; `polyclinic deploy init {path}` makes one")
    known = load_study(folder / "study.toml")
    assert isinstance(known.data, AtSites)
    if (study.data.source, study.data.size) != (known.data.dataset, known.data.size):
        have = f"the sites of {folder} have '{known.data.dataset}' at {known.data.size} px"
        raise BadInput(f"data: {have}; submit a study of these, or make kits for this one")
    there = known.as_tables()
    return parse_study({**study.as_tables(), "data": there["data"], "sites": there["sites"]})


def with_digest_of_weights(study: Study) -> Study:
    """The study with the SHA-256 of its file of first weights, for the sites' people to see."""
    if study.model.weights in (RANDOM, PUBLIC) or study.model.weights_sha256 or not Path(study.model.weights).exists():
        return study
    return study.with_settings({"model.weights_sha256": read_weights(Path(study.model.weights)).sha256})


def describe(job: JsonObject, administration: Administration) -> str:
    """One line about a job."""
    text = f"{job['job_id']}  {job['status']}"
    if job["status"] != "RUNNING":
        return text
    told = administration.progress(job["job_id"])
    if told is None:
        return f"{text}  (gives no answer: it is starting, or was lost with its server)"
    done, lost = (told["last"] or {}).get("round", 0), ", ".join(told["lost"])
    text += f"  {told['run']}: {done} of {told['rounds']} rounds{f', lost: {lost}' if lost else ''}"
    return "; ".join([text, *in_words(told["approvals"])])
