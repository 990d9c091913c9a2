"""A process tree ends whole: politely where it can be asked, and by force where it cannot."""

import subprocess
import sys

import psutil
import pytest

from polyclinic.engines.nvflare.process_tree import end_tree

#: starts a child in a session of its own, says its number, and waits; it may refuse to be asked
PARENT = """
import signal, subprocess, sys, time
if {deaf}:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
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
