"""A process tree ends whole: politely where it can be asked, by force where it cannot. A process ends with another."""

import os
import subprocess
import sys
import time
from functools import partial

import psutil
import pytest
from processes import kill, start, wait_for

from polyclinic.engines.nvflare.job import end_tree, end_with

#: starts a child in a session of its own, says its number, and waits; it may refuse to be asked
PARENT = """
import signal, subprocess, sys, time
if {deaf}:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(3600)
"""


@pytest.mark.parametrize(("deaf", "patience"), [(False, 20.0), (True, 0.2), (False, 0)])
def test_parent_and_child_are_gone(deaf: bool, patience: float):
    parent = subprocess.Popen([sys.executable, "-c", PARENT.format(deaf=deaf)], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(parent.stdout.readline()))
    if not deaf and patience:
        child.terminate()  # it would outlive its parent, and be waited for as long as patience goes
    end_tree(parent.pid, patience=patience)
    assert not psutil.pid_exists(parent.pid)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    parent.stdout.close()
    parent.returncode = 0


def test_a_process_that_has_ended_already_is_no_error():
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    end_tree(done.pid)


def _sleep():
    time.sleep(3600)


def _watch(pid, told, *leave):
    end_with(pid, *leave)
    told.touch()
    time.sleep(3600)


def _leave(told, failing):
    told.touch()
    assert not failing


def test_a_process_ends_with_another(tmp_path):
    other = start(_sleep)
    watching = start(_watch, other.pid, tmp_path / "watching")
    wait_for((tmp_path / "watching").exists)
    assert watching.is_alive()
    os.kill(other.pid, 9)  # not waited for: as long as nobody asks for its exit code it is there, as a zombie
    watching.join()
    assert watching.exitcode == 1
    kill(other)


@pytest.mark.parametrize("failing", [False, True])
def test_a_process_that_ends_with_another_has_a_last_word(tmp_path, failing):
    other = start(_sleep)
    watching = start(_watch, other.pid, tmp_path / "watching", partial(_leave, tmp_path / "said", failing))
    wait_for((tmp_path / "watching").exists)
    assert not (tmp_path / "said").exists()
    kill(other)
    watching.join()
    assert (watching.exitcode, (tmp_path / "said").exists()) == (1, True)


#: a process that ends, with a word, when the one that started it is gone
LEAVING = """
import os, sys, time
from polyclinic.engines.nvflare.job import end_with
end_with(os.getppid(), lambda: open(sys.argv[1], "w").close())
print(os.getpid(), flush=True)
time.sleep(3600)
"""
STARTS = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], start_new_session=True)
time.sleep(3600)
"""


def test_children_that_end_with_their_parent_have_a_moment_for_it(tmp_path):
    """A clean stop of a site: its job says goodbye before it ends."""
    command = [sys.executable, "-c", STARTS, LEAVING, tmp_path / "said"]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    end_tree(parent.pid)
    assert (tmp_path / "said").exists()
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    parent.stdout.close()
    parent.returncode = 0


def test_a_process_that_comes_too_late_ends_at_once(tmp_path):
    other = start(_sleep)
    kill(other)
    watching = start(_watch, other.pid, tmp_path / "watching")
    watching.join()
    assert watching.exitcode == 1
    assert not (tmp_path / "watching").exists()
