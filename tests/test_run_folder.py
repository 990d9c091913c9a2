"""A finished run's files are checked when they are read: one flipped bit is named."""

import json
import os
import shutil
import signal
import sys

import pytest
from processes import kill, start, stop, wait_for

from polyclinic import run_folder
from polyclinic import run_folder as folder_lock
from polyclinic.engines.worker_process import WorkerProcess
from polyclinic.errors import BadInput, Damaged
from polyclinic.federation.call import Call
from polyclinic.run_folder import DIGESTS, FINISHED, WORKERS, check_whole, read_result, run_lock, worker_lock
from polyclinic.runner.run.run import run


@pytest.fixture
def folder(tiny, undisturbed, tmp_path):
    finished = undisturbed(tiny("fedavg", {"data.samples": 36}, rounds=1))
    shutil.copytree(finished.folder, tmp_path / "run")
    return tmp_path / "run"


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("place", [3, 40, -2])
@pytest.mark.parametrize("name", [*FINISHED, DIGESTS])
def test_a_flipped_bit_is_noticed(folder, name, place):
    check_whole(folder, *FINISHED)
    flip(folder / name, place)
    with pytest.raises(Damaged, match=f"{name}: is damaged"):
        check_whole(folder, *FINISHED)


@pytest.mark.parametrize("name", FINISHED)
def test_a_file_that_is_gone_is_noticed(folder, name):
    (folder / name).unlink()
    with pytest.raises(Damaged, match=name):
        check_whole(folder, name)


@pytest.mark.parametrize("site", ["site-1", "site-3"])
def test_a_damaged_ledger_of_a_finished_run_is_noticed(folder, site):
    assert run(None, folder, resume=True)["rounds"] == 1
    flip(folder / "ledger" / f"{site}.jsonl", 40)
    with pytest.raises(Damaged, match=rf"ledger/{site}.jsonl: is damaged"):
        run(None, folder, resume=True)


def test_a_missing_or_damaged_hand_over_is_noticed(tiny, tmp_path):
    from polyclinic.runner.compare.forgetting import matrices

    settings = {"data.samples": 36, "evaluation.handovers": "all"}
    folder = run(tiny("cwt", settings, rounds=1), tmp_path / "run").folder
    assert matrices(folder)["rounds"].keys() == {1}
    handed = sorted((folder / "handovers" / "round-1").iterdir())
    honest = handed[0].read_bytes()
    flip(handed[0], -2)
    with pytest.raises(Damaged, match=handed[0].name):
        matrices(folder)
    handed[0].write_bytes(honest)
    handed[-1].unlink()
    with pytest.raises(Damaged, match=handed[-1].name):
        matrices(folder)


def test_a_run_killed_just_before_its_result_was_written_ends_the_same(folder, monkeypatch):
    """The digests are written first: a result without them would vouch for files that nobody checks."""
    values = json.loads((folder / "result.json").read_text())
    (folder / "result.json").unlink()
    (folder / DIGESTS).write_text('{"files": {"history.jsonl": "another"}, "sha256": "another"}')  # done again
    seen = []

    def write(path, content, **options):
        seen.append((path.name, (folder / "result.json").exists()))
        return honest(path, content, **options)

    honest = run_folder.atomic_write
    monkeypatch.setattr(run_folder, "atomic_write", write)
    again = run(None, folder, resume=True)
    assert again["weights_sha256"] == values["weights_sha256"]
    assert seen[-2:] == [(DIGESTS, False), ("result.json", False)]
    check_whole(folder, "*")


def test_a_damaged_result_is_not_read(folder, tiny):
    values = json.loads((folder / "result.json").read_text())
    assert read_result(folder) == values
    values["metrics"]["test"]["accuracy"] = 1.0
    (folder / "result.json").write_text(json.dumps(values))
    with pytest.raises(Damaged, match=r"result.json: is damaged"):
        run(None, folder, resume=True)


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "\x00", '{"a":' * 100_000])
def test_an_older_run_with_a_result_that_is_no_json_is_named(folder, text):
    (folder / DIGESTS).unlink()
    (folder / "result.json").write_text(text)
    with pytest.raises(Damaged, match=r"result.json: is damaged"):
        read_result(folder)


def test_a_run_without_noted_digests_is_of_an_older_version(folder):
    (folder / DIGESTS).unlink()
    flip(folder / "history.jsonl", 3)
    check_whole(folder, *FINISHED)


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
