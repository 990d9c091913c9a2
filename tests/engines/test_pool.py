"""Workers run a little ahead of whoever takes their answers, and no further: answers are models, and models are big."""

import threading

import pytest
from processes import idle_host, wait_for

from polyclinic.engines.in_process import InProcess
from polyclinic.engines.pool import PREFETCH
from polyclinic.federation.call import Call, Reply
from polyclinic.federation.state import SitePosition

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
    return InProcess(idle_host(), SITES, start or (lambda: Worker(done, after)), workers=2)


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
    assert threading.active_count() == before


def test_an_error_that_is_no_sites_fault_is_not_lost(done):
    def start():
        raise SystemExit("no more processes")

    with pytest.raises(SystemExit, match="no more processes"):
        list(engine_of(done, start=start).call(calls()))
