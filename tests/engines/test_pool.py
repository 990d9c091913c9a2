"""A pool of worker processes: calls, order, failures, and the same result as one process."""

import itertools
import json
import os
import threading

import pytest
from processes import ForkedWorker, idle_host, wait_for
from run_folders import assert_same_run

import polyclinic
from polyclinic.engines import in_process, pool
from polyclinic.engines.in_process import InProcess
from polyclinic.engines.pool import PREFETCH
from polyclinic.engines.worker_process import WorkerGone
from polyclinic.federation.call import Call, Failure, Reply
from polyclinic.federation.host import OpenSites, SiteHost
from polyclinic.federation.layers import gate
from polyclinic.federation.ledger import digest_threads, parcel
from polyclinic.federation.ledger.ledger import Ledger
from polyclinic.federation.site import SitePosition
from polyclinic.runner.run import engines
from polyclinic.runner.run.recorder import Recorder
from polyclinic.runner.run.run import run

SITES = tuple(f"s{k}" for k in range(10))


class Worker:
    """Answers at once; a site in `after` answers after the site that is named there has been at work."""

    def __init__(self, done, after=None):
        self.done, self.after = done, after or {}

    def restore(self, positions):
        pass

    def call(self, call, deadline):
        wait_for(lambda: self.after.get(call.site) in {None, *self.done})
        self.done.append(call.site)
        return Reply(call.site, ()), SitePosition(1, 1)

    def kill(self):
        pass


@pytest.fixture
def done():
    return []


def engine_of(done, after=None, start=None):
    start = (lambda: Worker(done, after)) if start is None else start
    return InProcess(idle_host(), SITES, start, workers=2)


def calls():
    return [Call(site, "train", 1) for site in SITES]


@pytest.mark.parametrize("after", [{}, {"s0": "s3"}, {"s1": "s2", "s3": "s2"}, {"s8": "s9"}])
def test_answers_come_in_the_order_of_the_calls(done, after):
    assert [answer.site for answer in engine_of(done, after).call(calls())] == list(SITES)
    assert sorted(done) == sorted(SITES)


def test_no_worker_is_further_ahead_than_it_may(done):
    """The coordinator is slower than the sites: it waits until they have done all they may."""
    for taken, _ in enumerate(engine_of(done).call(calls())):
        allowed = min(len(SITES), taken + 2 * PREFETCH)
        wait_for(lambda allowed=allowed: len(done) >= allowed)
        assert len(done) == allowed


def test_whoever_stops_taking_answers_stops_the_sites(done):
    before = threading.active_count()
    answers = engine_of(done).call(calls())
    next(answers)
    answers.close()
    assert 1 <= len(done) <= 2 * PREFETCH
    assert threading.active_count() <= before


def test_an_error_that_is_no_sites_fault_is_not_lost(done):
    def start():
        raise SystemExit("no more processes")

    with pytest.raises(SystemExit, match="no more processes"):
        list(engine_of(done, start=start).call(calls()))


class Hanging:
    """Sites in `hang` never answer, until the worker is killed; one that is `stubborn` does not even hear of that."""

    def __init__(self, hang=(), stubborn=None):
        self.hang, self.stubborn = hang, stubborn
        self.at_work, self.killed = threading.Event(), threading.Event()

    def restore(self, positions):
        self.restored = dict(positions)

    def call(self, call, deadline):
        if call.site in self.hang:
            self.at_work.set()
            (self.stubborn or self.killed).wait()
            raise WorkerGone("the site's process died")
        return Reply(call.site, ()), SitePosition(1, 1)

    def kill(self):
        self.killed.set()


class Started(list):
    """All workers that an engine started; those of lane 1 hang at site s1."""

    def __init__(self, stubborn=None):
        self.stubborn, self.hang = stubborn, ("s1",)

    def __call__(self):
        self.append(Hanging(self.hang, self.stubborn))
        return self[-1]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_where_answers_are_taken_does_not_wait_for_a_site_that_hangs(error):
    started, before = Started(), threading.active_count()
    engine = engine_of([], start=started)

    def take_answers():
        for _ in zip(calls(), engine.call(calls()), strict=True):  # as the coordinator takes them
            wait_for(lambda: any(worker.at_work.is_set() for worker in started))
            raise error

    with pytest.raises(error):
        take_answers()
    assert all(worker.killed.is_set() for worker in started)
    assert len(started) == 2  # no other was started for the calls that were still to come
    assert threading.active_count() <= before


@pytest.mark.timeout(60)
def test_sites_that_were_abandoned_work_again_from_where_they_stood():
    started = Started()
    engine = engine_of([], start=started)
    answers = engine.call(calls())
    next(answers)
    wait_for(lambda: any(worker.at_work.is_set() for worker in started))
    del answers
    assert "s1" not in engine.checkpoint()  # its call never ended
    started.hang = ()
    assert [answer.site for answer in engine.call(calls())] == list(SITES)
    assert SitePosition(1, 1) in [*started[2].restored.values(), *started[3].restored.values()]


@pytest.mark.timeout(60)
def test_a_thread_that_does_not_end_is_left_alone_and_spoils_nothing(monkeypatch):
    """Its worker was killed and it still waits: its failure, when it comes at last, must not end the next worker."""
    monkeypatch.setattr(pool, "THREADS_END_WITHIN", 0.1)
    release, before = threading.Event(), threading.active_count()
    started = Started(release)
    engine = engine_of([], start=started)
    answers = engine.call(calls())
    next(answers)
    wait_for(lambda: any(worker.at_work.is_set() for worker in started))
    answers.close()
    started.hang = ()
    later = engine.call(calls())
    assert next(later).site == "s0"
    release.set()
    assert not any(isinstance(answer, Failure) for answer in later)
    wait_for(lambda: threading.active_count() <= before)
    assert len(started) == 4
    assert not any(worker.killed.is_set() for worker in started[2:])


def test_workers_are_kept_when_all_answers_were_taken():
    """Also by one who does not ask whether there is another."""
    started = Started()
    started.hang = ()
    engine = engine_of([], start=started)
    answers = engine.call(calls())
    for _ in SITES:
        next(answers)
    answers.close()
    assert not any(worker.killed.is_set() for worker in started)


KEEP = {"optimizer.keep_state": True}
BATCH_NORM = {"model.backbone": "small-cnn", "sites.count": 3}
STUDIES = {"fedavg": ("fedavg", KEEP), "fedbn": ("fedbn", BATCH_NORM), "cwt": ("cwt", {}), "splitnn": ("splitnn", KEEP)}
MORE = {
    "fedsgd": ("fedsgd", KEEP | {"optimizer.name": "adam"}),
    "fedavg-share": ("fedavg-share", {}),
    "standalone": ("standalone", {"evaluation.select": "best"}),
    "scaffold": ("scaffold", {}),
    "feddyn": ("feddyn", KEEP),
    "fedper": ("fedper", {"evaluation.select": "best"}),
    "finetune": ("finetune", {"evaluation.select": "best"}),
    "local statistics": ("fedprox", BATCH_NORM | {"model.batch_norm": "local", "evaluation.select": "best"}),
}


@pytest.fixture
def forked(monkeypatch):
    """Workers that start at once; the list of those that were started."""
    started = []

    class Counted(ForkedWorker):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(engines, "WorkerProcess", Counted)
    return started


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", STUDIES)
def test_the_number_of_workers_changes_nothing(tiny, undisturbed, forked, tmp_path, name, workers):
    method, settings = STUDIES[name]
    study = tiny(method, settings, rounds=2)
    run(study.with_settings({"engine.workers": workers}), tmp_path / "run")
    assert len(forked) == workers
    assert_same_run(tmp_path / "run", undisturbed(study).folder)


@pytest.mark.parametrize("name", STUDIES | MORE)
def test_growing_into_workers_in_mid_run_changes_nothing(tiny, undisturbed, forked, tmp_path, monkeypatch, name):
    method, settings = (STUDIES | MORE)[name]
    study = tiny(method, settings, rounds=2)
    monkeypatch.setattr(in_process, "PAYS_AFTER", 0.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    begun_here = []
    handle = SiteHost.handle
    monkeypatch.setattr(SiteHost, "handle", lambda self, call: (begun_here.append(call), handle(self, call))[1])
    run(study.with_settings({"engine.workers": "auto"}), tmp_path / "run")
    assert begun_here
    assert len(forked) == 2
    assert_same_run(tmp_path / "run", undisturbed(study).folder)


@pytest.mark.parametrize(("seconds", "workers"), [(0.5, 0), (1.5, 2)])
def test_only_much_work_grows_into_workers(tiny, undisturbed, forked, tmp_path, monkeypatch, seconds, workers):
    """Six sites, each of whose calls takes so long by a clock that only this test has: round 2 decides."""
    clock = itertools.count(step=seconds)
    monkeypatch.setattr(in_process, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    study = tiny("fedavg", KEEP | {"sites.count": 6, "evaluation.every": 0}, rounds=2)
    run(study.with_settings({"engine.workers": "auto"}), tmp_path / "run")
    assert len(forked) == workers
    assert_same_run(tmp_path / "run", undisturbed(study).folder)


@pytest.mark.parametrize("name", STUDIES | MORE)
def test_few_sites_in_memory_change_nothing(tiny, undisturbed, tmp_path, monkeypatch, name):
    method, settings = (STUDIES | MORE)[name]
    study = tiny(method, settings, rounds=2)
    expected = undisturbed(study).folder
    monkeypatch.setattr(OpenSites, "RESIDENT", 1)
    evicted = []
    save = OpenSites.save
    monkeypatch.setattr(OpenSites, "save", lambda self, name: (evicted.append(name), save(self, name))[1])
    run(study, tmp_path / "run")
    assert len(evicted) > 3
    assert_same_run(tmp_path / "run", expected)


def test_a_worker_started_from_the_command_line_gives_the_same_bits(tiny, undisturbed, tmp_path):
    """With a deadline even one worker is a process of its own: `python -m polyclinic.runner.run.worker`."""
    study = tiny("fedavg", KEEP, rounds=2)
    run(study.with_settings({"engine.workers": 1, "engine.deadline": 3600.0}), tmp_path / "run")
    assert_same_run(tmp_path / "run", undisturbed(study).folder)


@pytest.fixture
def make_soon(monkeypatch):
    """Call it, and every parcel counts as a large one: digests and lines are made beside training. Gives a list of the
    kinds of which lines were made so."""

    def make():
        waited, append_soon = [], Ledger.append_soon
        for module in (digest_threads, gate, parcel):
            monkeypatch.setattr(module, "PAYS_FROM", 0)

        def note(ledger, digest, **about):
            waited.append(about["kind"])
            append_soon(ledger, digest, **about)

        monkeypatch.setattr(Ledger, "append_soon", note)
        return waited

    return make


def content(folder):
    """Ledgers, communication, heads and weights of a run."""
    result = json.loads((folder / "result.json").read_text())
    ledgers = {path.name: path.read_bytes() for path in sorted((folder / "ledger").iterdir())}
    return ledgers, result["communication"], result["ledgers"], result["weights_sha256"]


@pytest.mark.parametrize("method", ["fedavg", "cwt"])
def test_the_run_folder_is_the_same(tiny, undisturbed, make_soon, tmp_path, method):
    expected = undisturbed(tiny(method))
    waited = make_soon()
    polyclinic.run(tiny(method), tmp_path / "run")
    assert "weights" in waited
    assert content(tmp_path / "run") == content(expected.folder)


def test_an_interrupted_run_ends_with_the_same_ledgers(tiny, undisturbed, make_soon, tmp_path, monkeypatch):
    expected, folder = undisturbed(tiny("fedavg")), tmp_path / "run"
    make_soon()
    with monkeypatch.context() as patch:
        rounds = iter([1, 0])
        patch.setattr(Recorder, "round_done", lambda *_: 1 / next(rounds))
        with pytest.raises(ZeroDivisionError):
            polyclinic.run(tiny("fedavg"), folder)
    polyclinic.run(tiny("fedavg"), folder, resume=True)
    assert content(folder) == content(expected.folder)


class Host:
    """A host whose sites fail, each with the error that it is given; it notes who is asked alone."""

    GROUPED = 64

    def __init__(self, *errors):
        self.errors, self.alone = errors, []

    def is_grouped(self, operation, sites):
        return True

    def can_divide(self, operation):
        return True

    def handle_group(self, calls):
        return list(self.errors)

    def handle(self, call):
        self.alone.append(call.site)
        raise RuntimeError("alone as well")


def ask(host):
    engine = InProcess(host, ("a", "b"), lambda: None, workers=1, stacked=True)
    return list(engine.call([Call("a", "train", 1), Call("b", "train", 1)]))


def test_what_every_gate_refuses_is_not_worked_at_again():
    host = Host(ValueError("refused at a"), ValueError("refused at b"))
    failures = ask(host)
    assert all(isinstance(one, Failure) for one in failures)
    assert ["refused at a" in failures[0].reason, "refused at b" in failures[1].reason] == [True, True]
    assert not host.alone


def test_work_that_failed_for_all_is_done_by_each_site_alone():
    error = RuntimeError("no memory")
    host = Host(error, error)
    assert ["alone as well" in one.reason for one in ask(host)] == [True, True]
    assert host.alone == ["a", "b"]
