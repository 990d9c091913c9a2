"""Sites that are asked together: who is asked again alone after a failure, and who is not."""

from __future__ import annotations

from polyclinic.engines.in_process import InProcess
from polyclinic.federation.call import Call, Failure


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
