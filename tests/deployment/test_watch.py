"""Watching a deployed run, and the files of its services."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer.main

from polyclinic.cli import run_app
from polyclinic.cli.app import app
from polyclinic.deployment import admin
from polyclinic.deployment.admin import ATTEMPTS, Administration, ServerGone, Submission, Watch
from polyclinic.deployment.coordination import STOPPED
from polyclinic.deployment.kits import README_OF_ADMIN, README_OF_SERVER, README_OF_SITE
from polyclinic.deployment.study_in_words import bytes_a_round, traffic_in_words
from polyclinic.engines.worker_process import Outcome
from polyclinic.errors import WorkFailed
from polyclinic.runner.run.recorder import Display
from polyclinic.study import Study

LOST = (["SUBMITTED", "RUNNING", "FINISHED:ABORTED"], None)
REJOINING = (["RUNNING", "FINISHED:COMPLETED"], Outcome("Rejoining", "site-2: back again"))
ENDED = (["RUNNING", "FINISHED:ABORTED"], Outcome("JobEnded", "NVFlare ended the job"))
DONE = (["RUNNING", "FINISHED:COMPLETED"], Outcome(values={"rounds": 2}))


class Server:
    """Answers for job after job: what it says of a job's status, look by look, and the outcome that the job left."""

    def __init__(self, *jobs):
        self.jobs = [list(statuses) for statuses, _ in jobs]
        self.outcomes = [outcome for _, outcome in jobs]
        self.submitted, self.aborted = [], []
        self.starts = []  # of the server, look by look

    def status(self, job):
        said = self.jobs[int(job)].pop(0)
        if isinstance(said, Exception):
            raise said
        return said

    def progress(self, job):
        return None

    def begun(self):
        return self.starts.pop(0) if self.starts else 1.0

    def stop(self, job, now):
        self.aborted.append(job)
        raise WorkFailed("the server refused: it knows no such job")

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


@pytest.mark.parametrize("jobs", [(LOST, REJOINING), (ENDED, LOST)])
def test_a_job_that_was_lost_or_ended_or_that_a_site_rejoins_is_submitted_again(watch, jobs):
    server = Server(*jobs, DONE)
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


def test_a_server_that_was_restarted_is_waited_for_and_the_run_goes_on(tiny, monkeypatch):
    monkeypatch.setattr(admin, "LOOK", 0)
    gone = ServerGone("no server answers within 30 seconds (--within)")
    server = Server((["RUNNING", gone, gone, "FINISHED:ABANDONED"], None), DONE)
    said = []
    assert Watch(server, Display(), said.append).run(Submission(tiny("fedavg"), "run"), "0") == {"rounds": 2}
    assert [one.resume for one in server.submitted] == [True]
    assert [words for words in said if "server" in words] == [
        "no server answers within 30 seconds (--within); it has 15 minutes to come back",
        "the server is back",
    ]


def test_a_restarted_server_that_calls_the_lost_job_running_is_not_believed(watch):
    """It was away for less than a look: nobody saw that it was gone."""
    server = Server((["RUNNING"] * 3, None), DONE)
    server.starts = [1.0, 1.0, 7.0, 7.0, 7.0]
    assert watch(server) == {"rounds": 2}
    assert (server.aborted, [one.resume for one in server.submitted]) == (["0"], [True])
    assert server.jobs[0] == ["RUNNING"], "it was asked twice"


def test_a_server_that_does_not_come_back_is_given_up(watch, monkeypatch):
    monkeypatch.setattr(admin, "SERVER_WAIT", -1.0)
    with pytest.raises(ServerGone):
        watch(Server((["RUNNING", *[ServerGone("no server answers")] * 3], None)))


def test_a_site_that_is_lost_or_back_is_told_once(tiny, monkeypatch):
    monkeypatch.setattr(admin, "LOOK", 0)
    server, said = Server((["RUNNING"] * 6 + ["FINISHED:COMPLETED"], Outcome(values={"rounds": 2}))), []
    told = [{"lost": lost, "last": {"round": 1}} for lost in ([], ["a"], ["a"], ["a", "b"], ["b"], [])]
    server.progress = lambda job: told.pop(0)
    Watch(server, Display(), said.append).run(Submission(tiny("fedavg"), "run"), "0")
    assert said == ["lost: a", "lost: a, b", "lost: b", "no site is lost any more"]


def test_what_nvflare_says_while_it_connects_is_not_shown(tmp_path, monkeypatch, capsys):
    """It logs tracebacks of failures that it gets over, to the root logger, which has no handler in a command."""
    api = pytest.importorskip("nvflare.fuel.flare_api.flare_api", reason="the extra [nvflare] is not installed")
    (tmp_path / "admin" / "startup").mkdir(parents=True)
    (tmp_path / "admin" / "startup" / "fed_admin.json").write_text("{}")

    def session(*_, **__):
        print("Traceback (most recent call last): ...", file=sys.stderr)
        return SimpleNamespace(close=lambda: None, list_jobs=lambda reverse: [print("a trace", file=sys.stderr)])

    monkeypatch.setattr(api, "new_secure_session", session)
    assert Administration(tmp_path).jobs() == [None]
    assert capsys.readouterr().err == ""


class Info:
    """What a server says of the sites that it knows."""

    def __init__(self, **heard):
        self.client_info = [SimpleNamespace(name=name, last_connect_time=moment) for name, moment in heard.items()]


@pytest.mark.parametrize("clock", [0.0, 3600.0, 1e9])
def test_a_site_that_the_server_has_not_heard_of_is_not_connected_whatever_clocks_say(tmp_path, monkeypatch, clock):
    (tmp_path / "admin" / "startup").mkdir(parents=True)
    (tmp_path / "admin" / "startup" / "fed_admin.json").write_text("{}")
    administration = Administration(tmp_path)
    info = Info(north=clock + 1000.0, south=clock + 700.0, west=clock + 990.0)
    monkeypatch.setattr(administration, "_ask", lambda question: info)
    assert administration.connected() == ["north", "west"]
    assert administration.silences()["south"] == pytest.approx(300.0)
    monkeypatch.setattr(administration, "_ask", lambda question: Info())
    assert administration.connected() == []
    assert administration.silences(patient=True) == {}


@pytest.mark.parametrize(
    ("clock", "later", "lost"),
    [
        (1000.0, 1000.0, False),  # all is well, and nobody waits
        (5000.0, 1010.0, False),  # this machine's clock is an hour ahead
        (-5000.0, 1010.0, False),  # or behind
        (5000.0, 1000.0, True),  # nobody was heard of meanwhile
        (-5000.0, 1000.0, True),
    ],
)
def test_status_tells_when_all_sites_are_lost(tmp_path, monkeypatch, clock, later, lost):
    (tmp_path / "admin" / "startup").mkdir(parents=True)
    (tmp_path / "admin" / "startup" / "fed_admin.json").write_text("{}")
    administration, waited = Administration(tmp_path), []
    looks = [Info(north=1000.0, south=990.0), Info(north=later, south=later)]
    monkeypatch.setattr(administration, "_ask", lambda question: looks[len(waited)])
    monkeypatch.setattr(admin, "time", SimpleNamespace(time=lambda: clock + 1.0, sleep=waited.append))
    silences = administration.silences(patient=True)
    assert all((silence >= admin.SILENT) is lost for silence in silences.values())
    assert waited == ([] if clock == 1000.0 else [admin.TELLS])


def test_a_server_that_is_gone_when_the_watch_begins_is_waited_for(watch):
    server = Server(DONE)
    server.begun = lambda: (_ for _ in ()).throw(ServerGone("no server answers"))
    assert watch(server) == {"rounds": 2}


FOLDER = Path(__file__).parents[2] / "deploy"
UNITS = sorted((FOLDER / "systemd").glob("*.service"))


def command_of(unit: Path) -> list[str]:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read(unit)
    return shlex.split(parser["Service"]["ExecStart"])


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_the_command_of_a_unit_exists(unit, capsys):
    program, *words = command_of(unit)
    assert program.endswith("/bin/polyclinic")
    assert run_app([*words[:2], "--help"]) == 0


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_finds_nothing_wrong_with_a_unit(unit, tmp_path):
    program = command_of(unit)[0]
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace(program, shutil.which("true")))
    said = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60)
    about_it = [line for line in said.stderr.splitlines() if unit.name in line]
    assert about_it == []


def test_the_command_of_the_container_exists(capsys):
    text = (FOLDER / "Dockerfile").read_text()
    words = json.loads(re.search(r"^CMD (\[.*\])$", text, re.M)[1])
    assert run_app([*words[:2], "--help"]) == 0


def services_of(name: str) -> dict[str, dict[str, object]]:
    yaml = pytest.importorskip("yaml", reason="the extra [nvflare] is not installed")
    return yaml.safe_load((FOLDER / f"compose.{name}.yml").read_text())["services"]


@pytest.mark.parametrize("name", ["server", "site", "rehearsal"])
def test_containers_have_no_more_rights_than_they_need(name):
    for service in services_of(name).values():
        assert service["image"] == "polyclinic"
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["read_only"] is True
        assert service["tmpfs"] == ["/tmp"]
        assert not {"privileged", "network_mode", "cap_add", "user"} & service.keys()


def test_only_the_server_opens_a_port_and_images_are_read_only():
    (server,), (site,) = services_of("server").values(), services_of("site").values()
    assert server["ports"] == ["8002:8002"]
    assert "ports" not in site
    assert [volume for volume in site["volumes"] if volume.endswith(":/images:ro")]
    assert all("ports" not in service for service in services_of("rehearsal").values())


def test_the_rehearsal_has_the_sites_of_the_tutorial_and_a_command_that_exists(capsys):
    services = services_of("rehearsal")
    study = (FOLDER.parent / "docs" / "tutorials" / "three_hospitals.md").read_text()
    sites = json.loads(re.search(r"^names = (\[.*\])$", study, re.M)[1])
    assert sorted(services) == sorted([*sites, "server", "admin"])
    assert all(services[site]["volumes"] == [f"./deployment/sites/{site}:/kit"] for site in sites)
    assert run_app([*services["admin"]["command"][:2], "--help"]) == 0


@pytest.mark.parametrize("text", [README_OF_SITE, README_OF_SERVER, README_OF_ADMIN], ids=["site", "server", "admin"])
def test_the_commands_exist(text):
    whole = typer.main.get_command(app)
    found = re.findall(r"polyclinic ((?:site|deploy) [a-z-]+|ledger)", text)
    assert found
    for words in found:
        command = whole
        for word in words.split():
            assert word in command.commands, words
            command = command.commands[word]


def test_a_round_moves_the_model_there_and_back():
    study = Study(
        data={"source": "at-sites", "channels": 1, "size": 28},
        sites={"partition": "iid", "names": ["north", "south", "west"]},
        model={"backbone": "lenet5"},
        method={"name": "fedavg", "rounds": 5},
    )
    each = bytes_a_round(study)
    assert each == 4 * (6 * 26 + 16 * (6 * 25 + 1) + 120 * (400 + 1) + 84 * 121 + 2 * 85)
    assert bytes_a_round(study.with_settings({"engine.wire": "int8"})) == each // 4
    assert "in each of 5 rounds" in traffic_in_words(study)
