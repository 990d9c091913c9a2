"""No run begins in a folder in which a worker of an earlier run may still write."""

import os
import signal
import sys

import pytest
from processes import kill, start, stop, wait_for

from polyclinic import run_folder as folder_lock
from polyclinic.engines.worker_process import WorkerProcess
from polyclinic.errors import BadInput
from polyclinic.federation.call import Call
from polyclinic.run_folder import WORKERS, run_lock, worker_lock

WORKER = """
import os, pathlib, sys, time
from polyclinic.engines.worker_process import serve
from polyclinic.run_folder import worker_lock
class Host:
    def restore(self, positions): pass
    def handle(self, call):
        (folder / "at work").write_text(str(os.getpid()))
        time.sleep(3600)
folder = pathlib.Path(sys.argv[1])
with worker_lock(folder):
    serve(Host())
"""


def _run(folder):
    with run_lock(folder):
        worker = WorkerProcess([sys.executable, "-c", WORKER, str(folder)], threads=1)
        worker.restore({})
        worker.call(Call("a", "train", 1), None)


def test_a_run_waits_for_the_workers_of_one_that_was_killed(tmp_path, monkeypatch):
    """A worker that is stopped cannot notice that its run is gone: until it goes on, and ends, the folder is taken."""
    killed = start(_run, tmp_path)
    pid = int(wait_for(lambda: (tmp_path / "at work").exists() and (tmp_path / "at work").read_text()))
    with pytest.raises(BadInput, match="another run is working in it"), run_lock(tmp_path):
        pass
    stop(pid)
    kill(killed)
    with monkeypatch.context() as patch:
        patch.setattr(folder_lock, "ENDS_WITHIN", 0.2)
        with (
            pytest.raises(BadInput, match=f"process {pid}, a worker of an earlier run, has not ended yet"),
            run_lock(tmp_path),
        ):
            pass
    os.kill(pid, signal.SIGCONT)
    with run_lock(tmp_path):
        assert not (tmp_path / WORKERS).exists()


def test_a_run_leaves_no_locks_of_its_workers(tmp_path):
    with run_lock(tmp_path), worker_lock(tmp_path):
        assert list((tmp_path / WORKERS).iterdir())
    assert not (tmp_path / WORKERS).exists()
