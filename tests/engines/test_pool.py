"""Workers run a little ahead of whoever takes their answers, and no further: answers are models, and models are big."""

import threading

import pytest
from processes import idle_host, wait_for

from polyclinic.engines import pool
from polyclinic.engines.in_process import InProcess
from polyclinic.engines.pool import PREFETCH
from polyclinic.engines.worker_process import WorkerGone
from polyclinic.federation.call import Call, Failure, Reply
from polyclinic.federation.site import SitePosition

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
