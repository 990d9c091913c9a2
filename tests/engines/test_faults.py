"""A site that fails is named, the others go on, it is back in the next round; or the run stops and can be resumed."""

import os
import signal
import threading
from pathlib import Path

import pytest
from faulty_method import will_hang
from json_schemas import assert_valid
from processes import ForkedWorker, wait_for
from run_folders import assert_same_run, history, ledgers, result

from polyclinic.errors import WorkFailed
from polyclinic.federation.federation import Federation
from polyclinic.federation.ledger.ledger import verify
from polyclinic.runner.run import engines
from polyclinic.runner.run.recorder import Display
from polyclinic.runner.run.run import run

PLUGIN = [str(Path(__file__).parents[1] / "faulty_method.py")]
#: `engine.deadline` of these tests, which no machine is too slow for
DEADLINE = 3600.0
#: how long a call that nobody will ever answer is waited for instead: that one fails however slow the machine is
SHORT = 0.5
REASONS = {
    "raise": "RuntimeError: the scanner is on fire",
    "nan": "site 'site-2' kept back weights of 'train': tensor 'conv1.bias' holds NaN or infinity",
    "nan loss": "site 'site-2' kept back weights of 'train': 'loss' is nan",
    "wrong shape": "weights: tensor 'conv1.bias' is torch.float32 (6, 1), expected torch.float32 (6,)",
    "images": "site 'site-2' kept back weights of 'train': tensor 'conv1.weight' holds images of the site itself",
    "hang": "no answer within the deadline (engine.deadline)",
    "die": "the site's process died (exit code -9)",
}


@pytest.fixture
def trouble(tmp_path):
    folder = tmp_path / "trouble"
    folder.mkdir()
    return folder


@pytest.fixture
def workers(monkeypatch, trouble):
    """The worker processes of runs, as they are started. The deadline comes early where a call is never answered."""
    started = []

    class Noted(ForkedWorker):
        stopped = False

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)

        def call(self, call, deadline):
            assert deadline in (None, DEADLINE)
            early = deadline and (self.stopped or will_hang(trouble, call))
            return super().call(call, SHORT if early else None)

    monkeypatch.setattr(engines, "WorkerProcess", Noted)
    return started


class After(Display):
    """Does something once, when a round is done: at that moment no worker is at work."""

    def __init__(self, round, act):
        self.round, self.act = round, act

    def round_done(self, line, rounds):
        if line["round"] == self.round:
            self.act()


def make(tiny, trouble, engine=None, **method):
    settings = {f"engine.{name}": value for name, value in (engine or {}).items()}
    return tiny("faulty", {"plugins": PLUGIN, **settings}, trouble=str(trouble), **method)


def check_one_failure(folder, reason, operation="train", round=2):
    """site-2 failed once, in round 2; it is named wherever a user looks, and was back in round 3."""
    assert_valid(folder)
    (failure,) = result(folder)["failures"]
    assert (failure["round"], failure["site"], failure["operation"]) == (round, "site-2", operation)
    assert failure["reason"].startswith(reason)
    failed = [line["failed"] for line in history(folder)]
    assert failed == [{}, {"site-2": f"{operation}: {failure['reason']}"}, {}]
    trained = {line["round"] for line in verify(folder / "ledger" / "site-2.jsonl") if line["kind"] == "weights"}
    assert 3 in trained
    others = [line["round"] for line in verify(folder / "ledger" / "site-1.jsonl") if line["kind"] == "weights"]
    assert others == [1, 2, 3]
    assert set(result(folder)["metrics"]["per_site"]) == {"site-1", "site-2", "site-3"}
    return trained


@pytest.mark.parametrize("what", ["raise", "nan", "nan loss", "wrong shape", "images"])
def test_the_round_goes_on_without_a_failed_site(tiny, trouble, workers, tmp_path, what):
    (trouble / "site-2-2").write_text(what)
    run(make(tiny, trouble), tmp_path / "run")
    trained = check_one_failure(tmp_path / "run", REASONS[what])
    assert trained == ({1, 2, 3} if what == "wrong shape" else {1, 3})  # wrong weights did leave, and are on record
    run(make(tiny, trouble, {"workers": 2}), tmp_path / "with workers")
    assert workers
    assert_same_run(tmp_path / "with workers", tmp_path / "run")


@pytest.mark.parametrize("what", ["hang", "die"])
def test_the_round_goes_on_without_a_site_that_hangs_or_dies_in_mid_call(tiny, trouble, workers, tmp_path, what):
    (trouble / "site-2-2").write_text(what)
    run(make(tiny, trouble, {"workers": 2, "deadline": DEADLINE}), tmp_path / "run")
    check_one_failure(tmp_path / "run", REASONS[what])
    assert len(workers) == 3  # two, and one in place of the one that is gone

    (trouble / "site-2-2").write_text("raise")  # which reason it was changes no number
    run(make(tiny, trouble), tmp_path / "raised")
    assert result(tmp_path / "run")["weights_sha256"] == result(tmp_path / "raised")["weights_sha256"]
    assert ledgers(tmp_path / "run") == ledgers(tmp_path / "raised")


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP], ids=["SIGKILL", "SIGSTOP"])
def test_a_worker_struck_while_idle_fails_its_next_call(tiny, trouble, workers, tmp_path, signal_number):
    """A stopped process takes no input: the deadline must cover sending the weights, too."""
    study = make(tiny, trouble, {"workers": 3, "deadline": DEADLINE})

    def strike():
        os.kill(workers[1]._process.pid, signal_number)
        workers[1].stopped = signal_number == signal.SIGSTOP

    run(study, tmp_path / "run", display=After(1, strike))
    (failure,) = result(tmp_path / "run")["failures"]
    assert failure["reason"].startswith(REASONS["die" if signal_number == signal.SIGKILL else "hang"])
    assert (failure["round"], failure["operation"]) == (2, "train")
    assert history(tmp_path / "run")[1]["failed"].keys() == {failure["site"]}
    assert len(workers) == 4


def test_state_of_a_site_that_sent_nan_is_not_spoilt(tiny, trouble, tmp_path):
    """FedBN: the site's batch-norm layers went NaN along with its weights; round 3 must start from those of round 1."""
    (trouble / "site-2-2").write_text("nan")
    study = tiny("faulty-bn", {"plugins": PLUGIN, "model.backbone": "small-cnn"}, trouble=str(trouble))
    run(study, tmp_path / "run")
    assert [failure["round"] for failure in result(tmp_path / "run")["failures"]] == [2]
    assert "site-2" in result(tmp_path / "run")["metrics"]["per_site"]


STOPS = {
    "quorum": ({}, {"site-2-2": "raise", "site-3-2": "nan"}, "1 of 3 sites are left and 2 are needed"),
    "stop": ({"on_failure": "stop"}, {"site-2-2": "raise"}, "engine.on_failure = 'stop'"),
    "all": ({"quorum": 0.01}, {f"site-{k}-2": "raise" for k in (1, 2, 3)}, "0 of 3 sites are left and 1 are needed"),
    "workers": ({"on_failure": "stop", "workers": 2, "deadline": DEADLINE}, {"site-2-2": "die"}, "'site-2' failed"),
}


@pytest.mark.parametrize("how", STOPS)
def test_a_run_that_stops_names_the_site_and_can_be_resumed(tiny, trouble, workers, tmp_path, how):
    engine, faults, message = STOPS[how]
    study = make(tiny, trouble, engine)
    for name, what in faults.items():
        (trouble / name).write_text(what)
    with pytest.raises(WorkFailed, match=message) as stopped:
        run(study, tmp_path / "run")
    assert "failed in round 2 (train)" in str(stopped.value)
    assert not (tmp_path / "run" / "result.json").exists()
    assert [line["round"] for line in history(tmp_path / "run")] == [1]

    with pytest.raises(WorkFailed):  # nothing was cured, nothing is lost
        run(study, tmp_path / "run", resume=True)
    for name in faults:
        (trouble / name).unlink()
    run(study, tmp_path / "run", resume=True)
    run(make(tiny, trouble), tmp_path / "undisturbed")
    assert_same_run(tmp_path / "run", tmp_path / "undisturbed")


def test_no_worker_outlives_a_run_that_stops(tiny, trouble, workers, tmp_path):
    (trouble / "site-2-1").write_text("raise")
    with pytest.raises(WorkFailed):
        run(make(tiny, trouble, {"workers": 2, "on_failure": "stop"}), tmp_path / "run")
    assert len(workers) == 2
    assert [worker._process.process.is_alive() for worker in workers] == [False, False]


def test_a_failure_in_the_last_round_does_not_cost_the_site_its_test(tiny, trouble, tmp_path):
    (trouble / "site-2-3").write_text("raise")
    values = run(make(tiny, trouble), tmp_path / "run")
    assert set(values.metrics["per_site"]) == {"site-1", "site-2", "site-3"}


@pytest.fixture
def listens_to_ctrl_c():
    """A shell's background job ignores Ctrl-C, and with it all that it starts: these tests as well."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def resumes(study, trouble, folder):
    """The sites' trouble is over: the run goes on, and becomes the one that nobody interrupted."""
    (trouble / "site-2-2").unlink()
    run(study, folder, resume=True)
    run(study, folder.with_name("undisturbed"))
    assert_same_run(folder, folder.with_name("undisturbed"))


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("listens_to_ctrl_c")
def test_ctrl_c_does_not_wait_for_sites_at_work(tiny, trouble, workers, tmp_path):
    """Nor does it start them again; the run can be resumed."""
    study = make(tiny, trouble, {"workers": 2})
    (trouble / "site-2-2").write_text("hang")

    def interrupt():
        wait_for((trouble / "site-2-hangs").exists)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(study, tmp_path / "run", display=After(1, threading.Thread(target=interrupt, daemon=True).start))
    assert [worker._process.process.is_alive() for worker in workers] == [False, False]
    resumes(study, trouble, tmp_path / "run")


@pytest.mark.timeout(300)
def test_ctrl_c_while_an_answer_is_taken_does_not_wait_for_sites_at_work(tiny, trouble, workers, tmp_path, monkeypatch):
    """It need not come while the coordinator waits: it may be counting the bytes of the first answer just then."""
    study = make(tiny, trouble, {"workers": 2})
    (trouble / "site-2-2").write_text("hang")
    check = Federation._checked

    def struck(federation, call, answer):
        if (call.site, call.operation, call.round) == ("site-1", "train", 2):
            wait_for((trouble / "site-2-hangs").exists)
            raise KeyboardInterrupt
        return check(federation, call, answer)

    monkeypatch.setattr(Federation, "_checked", struck)
    with pytest.raises(KeyboardInterrupt):
        run(study, tmp_path / "run")
    monkeypatch.setattr(Federation, "_checked", check)
    assert [worker._process.process.is_alive() for worker in workers] == [False, False]
    resumes(study, trouble, tmp_path / "run")
