"""Ray without Ray: a site whose files are broken ends the run; an extra that is not installed is named."""

import sys

import pytest

from polyclinic.engines.ray import RayWorker, SiteActor
from polyclinic.errors import BadInput, Damaged, StorageFailed
from polyclinic.federation.call import Call, Failure
from polyclinic.federation.ledger.ledger import LedgerBroken
from polyclinic.runner.run.run import run


class Host:
    """A host of sites whose work ends in an exception."""

    def __init__(self, error):
        self.error = error

    def restore(self, positions):
        pass

    def handle(self, call):
        raise self.error


class Remote:
    """An actor's function, asked here and now."""

    def __init__(self, function):
        self.remote = function


class Actor:
    """An actor of Ray's without Ray."""

    def __init__(self, error):
        actor = SiteActor(lambda spec: Host(error), "")
        actor.restore({})
        self.call = Remote(actor.call)


def answered(error, monkeypatch):
    monkeypatch.setattr(RayWorker, "_result", staticmethod(lambda reference, deadline: reference))
    return RayWorker(Actor(error)).call(Call("site-1", "train", 1), None)


@pytest.mark.parametrize("error", [LedgerBroken("l.jsonl, line 2: was changed"), Damaged("s.safetensors: is damaged")])
def test_a_broken_file_ends_the_run(error, monkeypatch):
    with pytest.raises(StorageFailed, match=f"what site 'site-1' keeps cannot be used: {error}"):
        answered(error, monkeypatch)


def test_any_other_failure_is_the_sites(monkeypatch):
    answer, position = answered(ValueError("odd"), monkeypatch)
    assert isinstance(answer, Failure)
    assert answer.reason == "ValueError: odd"
    assert position is None


@pytest.mark.parametrize("engine", ["ray", "nvflare"])
def test_the_extra_is_named(tiny, tmp_path, monkeypatch, engine):
    monkeypatch.setitem(sys.modules, engine, None)
    with pytest.raises(BadInput, match=rf"pip install 'polyclinic\[{engine}\]'"):
        run(tiny("fedavg", {"engine.name": engine}), tmp_path / "run")
