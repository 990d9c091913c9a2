"""`polyclinic serve` as a user types it: what it refuses, and a server that starts, answers and ends."""

import json
import re
import signal
import socket
import sys
import urllib.error
import urllib.request

import pytest
from processes import start_polyclinic, wait_for
from served import write_run

from polyclinic.cli import run_app


def refused(capsys, *arguments):
    """The one sentence with which a command is refused."""
    assert run_app(["serve", *map(str, arguments)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing"], "there is no such folder"),
        (["file"], "there is no such folder"),
        ([".", "--kit", "."], "give one of the two"),
        (["--kit", "."], "is no kit"),
        (["--kit", "server"], "is the server's kit"),
    ],
)
def test_folders_that_cannot_be_served(capsys, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "server" / "startup").mkdir(parents=True)
    (tmp_path / "server" / "startup" / "fed_server.json").write_text("{}")
    assert words in refused(capsys, *arguments)


def test_an_address_that_cannot_be_used(capsys, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "is taken already" in refused(capsys, tmp_path, "--port", taken.getsockname()[1])
    assert "cannot be used" in refused(capsys, tmp_path, "--host", "192.0.2.1", "--port", 0)  # of no machine


def test_without_its_packages(capsys, tmp_path, monkeypatch):
    monkeypatch.delattr("polyclinic.report.serve.server", raising=False)
    monkeypatch.delitem(sys.modules, "polyclinic.report.serve.server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install 'polyclinic[serve]'" in refused(capsys, tmp_path)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_a_server_starts_answers_and_ends(tmp_path, end):
    write_run(tmp_path / "runs" / "first")
    process = start_polyclinic("serve", tmp_path, "--port", 0)
    try:
        address, token = re.search(r"open (http://127\.0\.0\.1:\d+/)#token=(\S+)", process.stdout.readline()).groups()
        request = urllib.request.Request(f"{address}api/overview", headers={"authorization": f"Bearer {token}"})
        found = wait_for(lambda: _answer(request))
        assert [run["name"] for run in found["runs"]] == ["runs/first"]
        process.send_signal(end)
        assert process.wait() == 0
        assert "the server has ended" in process.stdout.read()
    finally:
        process.kill()
        process.wait()


def _answer(request):
    """The content of an answer; nothing while the server is not there yet."""
    try:
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read())
    except ConnectionError:
        return None
    except urllib.error.URLError as error:
        if isinstance(error.reason, ConnectionError):
            return None
        raise
