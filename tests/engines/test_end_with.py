"""A process ends when the one that it watches has been killed."""

import os
import time

import pytest
from processes import kill, start, wait_for

from polyclinic.engines.nvflare.end_with import end_with

pytest.importorskip("psutil", reason="comes with the extra [nvflare]")


def _sleep():
    time.sleep(3600)


def _watch(pid, told):
    end_with(pid)
    told.touch()
    time.sleep(3600)


def test_a_process_ends_with_another(tmp_path):
    other = start(_sleep)
    watching = start(_watch, other.pid, tmp_path / "watching")
    wait_for((tmp_path / "watching").exists)
    assert watching.is_alive()
    os.kill(other.pid, 9)  # not waited for: as long as nobody asks for its exit code it is there, as a zombie
    watching.join()
    assert watching.exitcode == 1
    kill(other)


def test_a_process_that_comes_too_late_ends_at_once(tmp_path):
    other = start(_sleep)
    kill(other)
    watching = start(_watch, other.pid, tmp_path / "watching")
    watching.join()
    assert watching.exitcode == 1
    assert not (tmp_path / "watching").exists()
