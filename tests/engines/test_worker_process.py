"""A worker process, its messages and its end, and the tree of processes that go with it."""

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import psutil
import pytest
import torch
from processes import idle_host, kill, start, wait_for

from polyclinic.engines import worker_process
from polyclinic.engines.in_process import InProcess
from polyclinic.engines.nvflare.job import end_tree, end_with
from polyclinic.engines.worker_process import WorkerGone, WorkerProcess, read_frame, write_frame
from polyclinic.federation.call import Call, Failure, pack
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.site import SitePosition

#: far more than a pipe takes in one go, so that a worker which does not read blocks who writes
LARGE = {"weights": Parcel("weights", {"w": torch.zeros(300_000)})}


def frame(message: bytes) -> bytes:
    return len(message).to_bytes(8, "little") + message


@pytest.fixture
def engine(tmp_path):
    """An engine whose workers are little shell scripts; `$READY` is the answer of a worker that has started."""
    (tmp_path / "ready").write_bytes(frame(pack({}, [])))
    made = []

    def make(script, sites=("a", "b"), workers=2, deadline=None, start=None):
        def start_worker():
            return WorkerProcess(["sh", "-c", script.replace("$READY", str(tmp_path / "ready"))], threads=1)

        made.append(InProcess(idle_host(), sites, start or start_worker, workers=workers, deadline=deadline))
        return made[-1]

    yield make
    for one in made:
        one.close()


def ask(engine, *sites, parcels=None):
    return list(engine.call([Call(site, "train", 1, parcels or {}) for site in sites]))


@pytest.mark.parametrize("script", ["exit 3", "cat $READY; exit 3", "cat $READY; exec <&-; sleep 0.3; exit 3"])
@pytest.mark.parametrize("parcels", [{}, LARGE], ids=["small", "large"])
def test_a_worker_that_dies_is_its_sites_failure(engine, script, parcels):
    answers = ask(engine(script), "a", "b", parcels=parcels)
    assert [(type(answer), answer.site, answer.operation) for answer in answers] == [
        (Failure, "a", "train"),
        (Failure, "b", "train"),
    ]
    assert answers[0].reason == "the site's process died (exit code 3)"


def test_a_worker_that_is_killed_between_calls_is_started_anew(engine):
    running = engine("cat $READY; exec sleep 3600")
    first = running._worker(0, threading.Event())
    first._process.kill()
    first._process.wait()
    assert ask(running, "a", parcels=LARGE)[0].reason == "the site's process died (exit code -9)"
    assert running._pool[0] is None
    assert running._worker(0, threading.Event())._process.pid != first._process.pid


@pytest.mark.parametrize("parcels", [{}, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("script", ["cat $READY", "cat $READY; printf '\\144\\000\\000\\000\\000\\000\\000\\000half'"])
def test_a_worker_that_hangs_fails_at_the_deadline(engine, parcels, script):
    """The large call cannot even be sent: a worker that does not read must not hold up the run. Nor may half an answer
    stretch the deadline."""
    running = engine(f"{script}; exec sleep 3600", deadline=0.5)
    answers = ask(running, "a", "b", parcels=parcels)
    assert [answer.reason for answer in answers] == ["no answer within the deadline (engine.deadline)"] * 2
    assert running._pool == [None, None]


def test_a_worker_that_never_starts_is_not_waited_for_forever(engine, monkeypatch):
    monkeypatch.setattr(worker_process, "STARTS_WITHIN", 0.5)
    (answer,) = ask(engine("exec sleep 3600"), "a")
    assert isinstance(answer, Failure)


@pytest.mark.parametrize("script", [
    "cat",  # everything comes back as it was sent
    "printf '%s' 'this is not a frame, but a long line of text'; exec sleep 3600",
    "cat $READY $READY; exec sleep 3600",
    "cat $READY; printf '\\003\\000\\000\\000\\000\\000\\000\\000abc'; exec sleep 3600",
])  # fmt: skip
def test_a_worker_that_talks_nonsense_is_its_sites_failure(engine, script, monkeypatch):
    monkeypatch.setattr(worker_process, "STARTS_WITHIN", 1.0)
    (answer,) = ask(engine(script, deadline=2.0), "a")
    assert isinstance(answer, Failure)


@pytest.mark.timeout(60)
def test_a_frame_of_nonsense_is_no_reason_to_wait(engine):
    """Without a deadline, too: a small frame is looked at for progress before it is taken for an answer."""
    (answer,) = ask(engine("cat $READY; printf '\\003\\000\\000\\000\\000\\000\\000\\000abc'; exec sleep 3600"), "a")
    assert isinstance(answer, Failure)
    assert "deadline" not in answer.reason


def test_a_worker_that_cannot_be_started_is_its_sites_failure(engine):
    def no_memory():
        raise OSError("out of processes")

    (answer,) = ask(engine("", start=no_memory), "b")
    assert (answer.site, answer.reason) == ("b", "OSError: out of processes")


def test_one_bad_worker_does_not_touch_the_others(engine, tmp_path, monkeypatch):
    """Of two lanes the first hangs; the second answers each of its sites."""
    answer = pack({"failed": "no scanner here", "position": [4, 2]}, [])
    (tmp_path / "answers").write_bytes(2 * frame(answer))
    (tmp_path / "first").touch()
    script = (
        f"if rm {tmp_path}/first 2>/dev/null; then cat $READY; else cat $READY {tmp_path}/answers; fi; exec sleep 3600"
    )
    running = engine(script, sites=("a", "b", "c", "d"), deadline=3600.0)
    hanging = running._worker(0, threading.Event())
    real_call = hanging.call
    monkeypatch.setattr(hanging, "call", lambda call, deadline: real_call(call, 0.5))
    answers = ask(running, "a", "b", "d")
    assert [a.site for a in answers] == ["a", "b", "d"]
    assert "deadline" in answers[0].reason
    assert [a.reason for a in answers[1:]] == ["no scanner here"] * 2
    assert running.checkpoint() == {"b": SitePosition(4, 2), "d": SitePosition(4, 2)}


def test_close_leaves_no_process(engine):
    running = engine("cat $READY; exec sleep 3600")
    pids = [running._worker(lane, threading.Event())._process.pid for lane in (0, 1)]
    running.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.timeout(60)
def test_a_killed_worker_is_not_waited_for_even_if_its_pipe_stays_open(tmp_path, monkeypatch):
    """A child of the worker's holds the pipe: its end never comes."""
    monkeypatch.setattr(worker_process, "EXITS_WITHIN", 0.1)
    worker = WorkerProcess(["sh", "-c", f"sleep 3600 & touch {tmp_path}/ready; wait"], threads=1)
    heard = []

    def ask():
        with pytest.raises(WorkerGone) as gone:
            worker.call(Call("a", "train", 1), None)
        heard.append(str(gone.value))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        wait_for((tmp_path / "ready").exists)
        worker.kill()
        thread.join(30)
        assert heard == ["the site's process died (exit code -9)"]
        with pytest.raises(WorkerGone, match="was ended"):
            worker.call(Call("a", "train", 1), None)
    finally:
        os.killpg(worker._process.pid, signal.SIGKILL)  # the child, which lies in the worker's session
        wait_for(lambda: not worker._exchanging.is_alive())
        worker.kill()


def test_frames_pass_a_pipe_whole_or_end_it():
    read, write = (os.fdopen(end, mode, buffering=0) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
    messages = [b"", b"x", os.urandom(65536), os.urandom(3_000_001)]

    def send():
        for message in messages:
            write_frame(write, message)
        write.close()

    thread = threading.Thread(target=send)
    thread.start()
    assert [read_frame(read) for _ in messages] == messages
    thread.join()
    assert read_frame(read) is None
    read.close()
    read, write = (os.fdopen(end, mode, buffering=0) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
    write.write((100).to_bytes(8, "little") + b"too short")
    write.close()
    assert read_frame(read) is None
    read.close()


BUSY = """
import os, pathlib, sys, time
from polyclinic.engines.worker_process import serve
class Host:
    def restore(self, positions): pass
    def handle(self, call):
        pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
        time.sleep(3600)
serve(Host())
"""


def test_workers_end_when_their_coordinator_is_killed(tmp_path):
    """Even in the middle of a call, when they do not look at their pipe."""
    told = tmp_path / "pid"
    coordinator = start(_ask_a_worker, [sys.executable, "-c", BUSY, str(told)])
    pid = int(wait_for(lambda: told.exists() and told.read_text()))
    os.kill(pid, 0)
    kill(coordinator)
    assert wait_for(lambda: not os.path.exists(f"/proc/{pid}/exe"))


def _ask_a_worker(command):
    worker = WorkerProcess(command, threads=1)
    worker.restore({})
    worker.call(Call("a", "train", 1), None)


def test_what_a_worker_is_told_is_in_no_process_list(tiny, tmp_path):
    """All users of a machine see the arguments of all processes."""
    from polyclinic.data.parts import prepare
    from polyclinic.runner.run import engines
    from polyclinic.runner.run.assembly import Assembly

    study = tiny("fedavg", {"sites.count": 2, "engine.workers": 2})
    assembly = Assembly(study, prepare(study.data, study.sites), tmp_path / "run")
    worker = engines.in_process_engine(assembly).start_worker()
    try:
        assert worker._process.args == [sys.executable, "-m", "polyclinic.runner.run.worker"]
        worker.restore({})  # it has read what it is to do, and started
    finally:
        worker.kill()


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
