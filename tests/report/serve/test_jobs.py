"""Starting, stopping and resuming runs from the page: real processes that start at once."""

import json
import os
import subprocess
import sys

import pytest
from processes import wait_for
from served import Served, write_run

from polyclinic.report.serve import jobs as module
from polyclinic.report.serve.jobs import Jobs
from polyclinic.report.serve.server import Access

#: stands for `polyclinic`, which takes seconds to start: says how it was called, and waits to be stopped
PROGRAM = """
import json, signal, sys, time
print(json.dumps(sys.argv[1:]), flush=True)
if "obstinate" in str(sys.argv): signal.signal(signal.SIGINT, signal.SIG_IGN)
if "failing" in str(sys.argv): sys.exit("data: there is no such source; choose another")
print("ready", flush=True)
try: time.sleep(600)
except KeyboardInterrupt: sys.exit(1)
"""


@pytest.fixture
def served(folder):
    """A server whose commands are the program above."""

    def start(command, **keywords):
        assert command[:3] == [sys.executable, "-m", "polyclinic"]
        return subprocess.Popen([sys.executable, "-S", "-c", PROGRAM, *command[3:]], **keywords)

    jobs = Jobs(folder, start)
    yield Served(folder, Access(8642), jobs)
    jobs.close()


def ready(served, name, kind="run"):
    """Wait until the command is there, and say how it was called."""
    log = served.folder / ".serve" / f"{kind}-{name.replace('/', '_')}.log"
    wait_for(lambda: log.exists() and "ready" in log.read_text())
    return json.loads(log.read_text().splitlines()[0])


def state(served, name):
    return next(job["state"] for job in served.jobs.facts() if job["name"] == name)


def test_a_study_of_the_folder_is_started_and_stopped(served):
    answer = served.post("/api/start", study="study.toml")
    assert answer.json() == {"name": "runs/study"}
    called = ready(served, "runs/study")
    study, out = served.folder / "study.toml", served.folder / "runs" / "study"
    assert called == ["run", str(study), "--out", str(out), "--quiet"]
    assert served.get("/api/overview").json()["jobs"][0]["state"] == "at work"
    assert served.get("/api/run", name="runs/study").json()["starting"] is True
    assert served.post("/api/stop", name="runs/study").status_code == 200
    wait_for(lambda: state(served, "runs/study") == "stopped")
    assert served.post("/api/stop", name="runs/study").status_code == 400


def test_every_start_gets_a_folder_of_its_own(served):
    assert served.post("/api/start", study="study.toml").json() == {"name": "runs/study"}
    assert served.post("/api/start", study="study.toml").json() == {"name": "runs/study-2"}
    assert served.post("/api/start", study="study.toml", name="Köln 2").json() == {"name": "runs/Köln 2"}


NOT_STARTED = [
    *({"study": "study.toml", "name": name} for name in (
        "../out", "a/b", ".hidden", "-x/..", "a\x00b", "a" * 101, "..", "C:x", "a\nb", "first",
    )),
    *({"study": study} for study in ("runs/first/result.json", "runs", "missing.toml", "notes.toml", ["study.toml"])),
    {"study": "study.toml", "sets": ["plugins=[]"]},
]  # fmt: skip


@pytest.mark.parametrize("asked", NOT_STARTED, ids=str)
def test_only_studies_are_started_under_a_new_name_and_as_they_are(served, asked):
    (served.folder / "notes.toml").write_text('title = "no study"\n')
    assert served.post("/api/start", **asked).status_code in (400, 404)
    assert served.jobs.facts() == []


def test_a_run_that_fails_says_why(served):
    (served.folder / "failing.toml").write_text('[method]\nname = "fedavg"\n')
    name = served.post("/api/start", study="failing.toml").json()["name"]
    wait_for(lambda: state(served, name) == "failed")
    assert not (served.folder / name).exists()
    assert served.jobs.facts()[0]["words"] == "data: there is no such source; choose another"


def test_a_run_that_does_not_stop_is_killed(served, monkeypatch):
    (served.folder / "obstinate.toml").write_text('[method]\nname = "fedavg"\n')
    name = served.post("/api/start", study="obstinate.toml").json()["name"]
    ready(served, name)
    served.jobs.stop(name)
    assert state(served, name) == "stopping"
    served.jobs.stop(name)  # the second time there is no mercy
    wait_for(lambda: state(served, name) == "stopped")
    other = served.post("/api/start", study="obstinate.toml").json()["name"]
    ready(served, other)
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    served.jobs.stop(other)
    wait_for(lambda: state(served, other) == "stopped")


def test_only_what_was_started_here_is_stopped(served):
    answer = served.post("/api/stop", name="runs/second")
    assert (answer.status_code, "was not started from this page" in answer.json()["error"]) == (400, True)


def test_a_stopped_run_goes_on_and_a_finished_one_does_not(served):
    assert served.post("/api/resume", name="runs/second").status_code == 200
    out = str(served.folder / "runs" / "second")
    assert ready(served, "runs/second") == ["run", "--resume", "--out", out, "--quiet"]
    assert served.post("/api/resume", name="runs/second").status_code == 400  # at work already
    assert "finished" in served.post("/api/resume", name="runs/first").json()["error"]


def test_a_report_is_made_on_demand(served):
    assert served.post("/api/report", name="runs/first").status_code == 200
    assert ready(served, "runs/first", "report") == ["report", str(served.folder / "runs" / "first")]
    assert served.post("/api/report", name="runs/second").status_code == 400


def test_few_commands_at_once(served, monkeypatch):
    monkeypatch.setattr(module, "MOST_AT_ONCE", 1)
    served.post("/api/start", study="study.toml")
    answer = served.post("/api/start", study="study.toml")
    assert (answer.status_code, "at work already" in answer.json()["error"]) == (400, True)
    assert not (served.folder / "runs" / "study-2").exists()


def test_the_end_of_the_server_is_the_end_of_its_runs(served):
    name = served.post("/api/start", study="study.toml").json()["name"]
    ready(served, name)
    pid = served.jobs._jobs["run", name].process.pid
    assert served.jobs.close() == [name]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_nothing_is_written_through_a_link(served, tmp_path):
    other = tmp_path / "linked"
    write_run(other / "runs" / "x")
    (served.folder / "runs").rename(tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", served.folder / "runs")
    assert served.post("/api/start", study="study.toml").status_code == 400
    assert served.jobs.facts() == []
