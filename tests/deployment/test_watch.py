"""Who watches over a run submits it again when it was lost, and not when its owner has stopped it.

The server's answers are written down here: a real server gives them in an order that nobody can choose.
"""

import pytest

from polyclinic.deployment import admin
from polyclinic.deployment.admin import ATTEMPTS, Submission, Watch
from polyclinic.deployment.coordination import STOPPED
from polyclinic.engines.outcome import Outcome
from polyclinic.errors import WorkFailed
from polyclinic.runner.recorder import Display

LOST = (["SUBMITTED", "RUNNING", "FINISHED:ABORTED"], None)
REJOINING = (["RUNNING", "FINISHED:COMPLETED"], Outcome("Rejoining", "site-2: back again"))
DONE = (["RUNNING", "FINISHED:COMPLETED"], Outcome(values={"rounds": 2}))


class Server:
    """Answers for job after job: what it says of a job's status, look by look, and the outcome that the job left."""

    def __init__(self, *jobs):
        self.jobs = [list(statuses) for statuses, _ in jobs]
        self.outcomes = [outcome for _, outcome in jobs]
        self.submitted = []

    def status(self, job):
        return self.jobs[int(job)].pop(0)

    def progress(self, job):
        return None

    def connected(self):
        return ["site-1"]

    def outcome(self, job):
        return self.outcomes[int(job)]

    def submit(self, submission):
        self.submitted.append(submission)
        return str(len(self.submitted))


@pytest.fixture
def watch(tiny, monkeypatch):
    monkeypatch.setattr(admin, "LOOK", 0)

    def run(server):
        return Watch(server, Display(), lambda words: None).run(Submission(tiny("fedavg"), "run"), "0")

    return run


def test_a_lost_job_and_one_that_a_site_rejoins_are_submitted_again(watch):
    server = Server(LOST, REJOINING, DONE)
    assert watch(server) == {"rounds": 2}
    assert [(one.name, one.resume) for one in server.submitted] == [("run", True), ("run", True)]


@pytest.mark.parametrize(
    "job",
    [
        (["RUNNING", "FINISHED:COMPLETED"], Outcome("Stopped", STOPPED)),  # after the round it was in
        (["RUNNING", "FINISHED:ABORTED"], Outcome("Stopped", STOPPED)),  # at once
        (["SUBMITTED", "FINISHED:ABORTED"], None),  # before it ran
    ],
)
def test_a_run_that_its_owner_stopped_is_not_submitted_again(watch, job):
    server = Server(job)
    with pytest.raises(WorkFailed, match="stopped by its owner"):
        watch(server)
    assert server.submitted == []


def test_a_run_that_is_lost_again_and_again_is_given_up(watch):
    server = Server(*[LOST] * ATTEMPTS)
    with pytest.raises(WorkFailed, match=f"stopped {ATTEMPTS} times in a row"):
        watch(server)
    assert len(server.submitted) == ATTEMPTS - 1
