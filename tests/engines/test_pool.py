"""Workers run a little ahead of whoever takes their answers, and no further: answers are models, and models are big."""

import threading
import time

import pytest

from polyclinic.engines.in_process import InProcess
from polyclinic.engines.pool import PREFETCH
from polyclinic.federation.call import Call, Reply
from polyclinic.federation.state import SitePosition

SITES = tuple(f"s{k}" for k in range(10))


class Worker:
    """Answers at once, or after the seconds that its slowest site takes."""

    def __init__(self, done, slow=()):
        self.done, self.slow = done, slow

    def restore(self, positions):
        pass

    def call(self, call, deadline):
        time.sleep(0.1 if call.site in self.slow else 0)
        self.done.append(call.site)
        return Reply(call.site, ()), SitePosition(1, 1)

    def kill(self):
        pass


@pytest.fixture
def done():
    return []


def engine_of(done, slow=(), start=None):
    return InProcess(None, SITES, start or (lambda: Worker(done, slow)), workers=2)


def calls():
    return [Call(site, "train", 1) for site in SITES]


@pytest.mark.parametrize("slow", [(), ("s0",), ("s1", "s3"), ("s8",)])
def test_answers_come_in_the_order_of_the_calls(done, slow):
    assert [answer.site for answer in engine_of(done, slow).call(calls())] == list(SITES)
    assert sorted(done) == sorted(SITES)


def test_no_worker_is_further_ahead_than_it_may(done):
    for taken, _ in enumerate(engine_of(done, slow=("s1",)).call(calls())):
        time.sleep(0.02)  # the coordinator is slower than the sites
        assert len(done) <= taken + 2 * PREFETCH


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
