"""A site that leaves for good, and a site that others no longer trust."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from pinned_keys import pin_keys

from polyclinic.cli import run_app
from polyclinic.deployment.approval import Approvals
from polyclinic.deployment.confirmation import confirmation_of
from polyclinic.deployment.processes import Participant, process_of
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.keys import KitKeys
from polyclinic.study import Study

PAGE = Path(__file__).parents[2] / "docs" / "hospital_it.md"


@pytest.fixture
def kit(tmp_path):
    """The kit of site 'north': its keys, a run that was approved and one that waits."""
    places = {name: tmp_path / name / "local" for name in ("north", "south", "server")}
    for place in places.values():
        place.mkdir(parents=True)
    pin_keys({name: places[name] for name in ("north", "south")}, places["server"])
    kit = tmp_path / "north"
    files = {
        "startup/fed_client.json": json.dumps({"client": {"fqsn": "north"}}),
        "startup/client.key": "secret",
        "startup/client.crt": "public",
        "local/policy.toml": "",
        "runs/first/sites/north/noise.key": "secret",
        "runs/first/model.safetensors": "model",
        "cache/images.npy": "images",
    }
    for name, text in files.items():
        (kit / name).parent.mkdir(parents=True, exist_ok=True)
        (kit / name).write_text(text)
    study = Study(
        data={"source": "at-sites", "dataset": "scans", "classes": ["clear", "ill"]},
        sites={"partition": "column", "names": ["north", "south"]},
        method={"name": "fedavg"},
    )
    approvals = Approvals(kit, "north")
    for run in ("first", "second", "third"):
        approvals.request(run, study, "1")
    approvals.decide("first", "approve")
    approvals.decide("third", "refuse")
    return kit


def test_what_could_act_in_its_name_goes_and_the_proof_stays(kit, capsys):
    assert run_app(["site", "leave", "--kit", str(kit)]) == 2
    assert "--yes: missing" in capsys.readouterr().err
    assert (kit / "startup" / "client.key").exists()
    assert run_app(["site", "leave", "--yes", "--kit", str(kit)]) == 0
    told = capsys.readouterr().out
    gone = ("startup/client.key", "local/sealing.key", "local/signing.key", "runs/first/sites/north/noise.key", "cache")
    for name in gone:
        assert f"deleted {kit / name}\n" in told
        assert not (kit / name).exists()
    for name in ("startup/client.crt", "local/site_keys.toml", "runs/first/model.safetensors"):
        assert (kit / name).exists()
    approvals = Approvals(kit, "north")
    assert [approvals.state(run) for run in ("first", "second", "third")] == ["revoked", "refused", "refused"]
    assert approvals.decisions("first")[-1].why == "the site leaves for good"
    assert approvals.decisions("third")[-1].why == ""
    with pytest.raises(BadInput, match=r"left for good on .*; to take part again, join anew"):
        Participant.of(kit).start()


def test_what_the_it_page_says_about_uninstalling_leaves_the_proof(kit):
    section = PAGE.read_text(encoding="utf-8").partition("\n## Uninstall\n")[2].partition("\n## ")[0]
    [line] = re.findall(r"^polyclinic (.*?)(?:  #.*)?$", section, re.MULTILINE)
    assert run_app([str(kit) if word.startswith("/var") else word for word in shlex.split(line)]) == 0
    assert [one.name for one in (kit / "approvals").iterdir()]
    assert not list(kit.rglob("*.key"))


def test_a_running_site_does_not_leave(kit, capsys, monkeypatch):
    monkeypatch.setattr("polyclinic.deployment.site_status.process_of", lambda folder: folder == kit)
    assert run_app(["site", "leave", "--yes", "--kit", str(kit)]) == 2
    assert "site north is running; stop it" in capsys.readouterr().err
    assert (kit / "startup" / "client.key").exists()


def test_nothing_is_sealed_for_a_site_that_is_not_trusted_and_its_old_ledgers_verify(kit, capsys):
    before = KitKeys(kit / "local").verifying_keys("south")
    assert KitKeys(kit / "local").public("south") is not None
    assert run_app(["site", "distrust", "south", "--kit", str(kit)]) == 0
    assert KitKeys(kit / "local").public("south") is None
    assert len(KitKeys(kit / "local").pinned()) == 2  # so that no secure sum needs fewer sites than before
    assert not confirmation_of(kit).rehearsal
    assert KitKeys(kit / "local").verifying_keys("south") == before
    assert run_app(["site", "distrust", "south", "--kit", str(kit)]) == 2
    assert "has no sealing key of this site" in capsys.readouterr().err


@pytest.mark.parametrize("program", ["client.client_train", "server.server_train"])
def test_a_kit_is_not_started_twice_on_a_machine(tmp_path, monkeypatch, program):
    """Two servers with one folder, or two sites with one name, would each do half of the work."""
    command = ["python", "-m", f"nvflare.private.fed.app.{program}", "-m", str(tmp_path.resolve())]
    here = [SimpleNamespace(pid=1, cmdline=lambda: command)]
    monkeypatch.setattr(psutil, "process_iter", lambda: here)
    with pytest.raises(BadInput, match="runs on this machine already"):
        Participant("server", tmp_path).start()
    command[-1] += "-2"
    assert not process_of(tmp_path)


def test_down_ends_what_start_began(tmp_path, capsys):
    """A server and a site that were started one by one, each in a terminal of its own."""
    for name, file in (("server", "fed_server.json"), ("sites/a", "fed_client.json")):
        (tmp_path / name / "startup").mkdir(parents=True)
        (tmp_path / name / "startup" / file).write_text('{"client": {"fqsn": "a"}}')
    waits = [sys.executable, "-c", "import time; time.sleep(600)"]
    begun = [
        subprocess.Popen([*waits, str((tmp_path / kit).resolve()), f"nvflare.{kind}_train"])
        for kit, kind in (("server", "server"), ("sites/a", "client"))
    ]
    try:
        assert run_app(["deploy", "down", "a", "-d", str(tmp_path)]) == 0
        assert "ended a" in capsys.readouterr().out
        assert not psutil.pid_exists(begun[1].pid)
        assert begun[0].poll() is None
        assert run_app(["deploy", "down", "-d", str(tmp_path)]) == 0
        assert not psutil.pid_exists(begun[0].pid)
    finally:
        for process in begun:
            process.kill()
