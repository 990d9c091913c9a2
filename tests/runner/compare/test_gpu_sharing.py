"""MPS around a comparison: a script in the place of NVIDIA's program notes how it is called."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from polyclinic.cli import run_app
from polyclinic.errors import BadInput
from polyclinic.runner.run.machine import CONTROL, LOGS, PIPES, mps

SCRIPT = """#!/bin/sh
if [ "$1" = "-d" ]; then echo "began in $CUDA_MPS_PIPE_DIRECTORY" >> NOTES; else read word; echo "$word" >> NOTES; fi
exit CODE
"""


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a program of NVIDIA's name on the path; gives what it noted."""
    monkeypatch.delenv(PIPES, raising=False)
    notes = tmp_path / "notes"

    def install(code: int = 0) -> Path:
        program = tmp_path / "bin" / CONTROL
        program.parent.mkdir()
        program.write_text(SCRIPT.replace("NOTES", str(notes)).replace("CODE", str(code)))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
        return notes

    return install


pytestmark = pytest.mark.skipif(os.name == "nt", reason="MPS is for Linux")


def test_the_service_begins_before_the_runs_and_ends_after_them(service, tmp_path):
    notes = service()
    with mps(tmp_path / "mps"):
        assert os.environ[PIPES] == os.environ[LOGS] == str(tmp_path / "mps")
        assert notes.read_text() == f"began in {tmp_path / 'mps'}\n"
    assert notes.read_text().splitlines()[1:] == ["quit"]
    assert PIPES not in os.environ


def test_the_service_ends_where_a_run_fails(service, tmp_path):
    notes = service()
    with pytest.raises(ZeroDivisionError), mps(tmp_path / "mps"):
        raise ZeroDivisionError
    assert notes.read_text().splitlines()[1:] == ["quit"]


def test_a_service_that_runs_already_is_used(service, tmp_path, monkeypatch):
    notes = service()
    monkeypatch.setenv(PIPES, "/somewhere")
    with mps(tmp_path / "mps"):
        assert os.environ[PIPES] == "/somewhere"
    assert not notes.exists()


def test_a_machine_without_the_service_is_told_so(monkeypatch, tmp_path):
    monkeypatch.delenv(PIPES, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match=r"^--mps: there is no nvidia-cuda-mps-control on this machine"), mps(tmp_path):
        pass


def test_a_service_that_fails_is_told_in_a_sentence(service, tmp_path):
    service(code=1)
    with pytest.raises(BadInput, match=r"^--mps: nvidia-cuda-mps-control did not answer"), mps(tmp_path / "mps"):
        pass
    assert PIPES not in os.environ


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5", ""])
def test_jobs_are_a_number_or_auto(text, tmp_path, capsys):
    assert run_app(["compare", "--methods", "fedavg", "--out", str(tmp_path / "out"), "--jobs", text]) == 2
    assert capsys.readouterr().err.startswith(f"--jobs {text}: write a number of runs from 1 on, or auto")
