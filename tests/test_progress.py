"""Progress of long inner work: told to whoever listens, shown as a bar or as lines with the time left."""

import io
import itertools
import os
from types import SimpleNamespace

import pytest
from rich.console import Console

from polyclinic import progress
from polyclinic.cli import display as displays
from polyclinic.cli.display import RunDisplay
from polyclinic.engines import worker_process
from polyclinic.engines.worker_process import WorkerProcess
from polyclinic.federation.call import pack, unpack
from polyclinic.progress import listening, tell, time_left
from polyclinic.runner.run.run import run


def test_nothing_is_told_where_nobody_listens_and_the_end_is_always_told(monkeypatch):
    tell("work", 1, 2)
    monkeypatch.setattr(progress, "EVERY", 3600.0)
    monkeypatch.setattr(progress, "_last", float("-inf"))
    told = []
    with listening(lambda *one: told.append(one)):
        for done in range(1, 6):
            tell("work", done, 5)
    tell("work", 5, 5)
    assert told == [("work", 1, 5), ("work", 5, 5)]


@pytest.mark.parametrize(("seconds", "done", "total", "words"), [
    (10, 1, 5, "about 40 s left"),
    (60, 2, 22, "about 10 min left"),
    (3, 5, 5, "about 0 s left"),
    (95, 1, 200, "time left not known yet"),
])  # fmt: skip
def test_the_time_left_follows_from_what_is_done(seconds, done, total, words):
    assert time_left(seconds, done, total) == words


def test_lines_of_a_log_say_how_far_and_how_long(monkeypatch, capsys):
    clock = itertools.count(0.0, 11.0)  # each look at the clock is eleven seconds later
    monkeypatch.setattr(displays.time, "monotonic", lambda: next(clock))
    shown = RunDisplay()
    shown.console = Console(file=io.StringIO())
    shown.working("generator of north", 0, 100)
    shown.working("generator of north", 20, 100)
    assert capsys.readouterr().err == "  generator of north: 20 of 100, about 44 s left\n"


def test_generators_tell_how_far_they_are(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.0)
    told = []

    class Shown(RunDisplay):
        def working(self, what, done, total):
            told.append((what, done, total))

    settings = {"generator.epochs": 1, "generator.width": 8, "replay.probe": False, "sites.count": 2}
    run(tiny("cwt-replay", settings, rounds=1), tmp_path / "run", display=Shown())
    assert told == [("autoencoder of site-1", 1, 1), ("autoencoder of site-2", 1, 1)]


def test_workers_tell_their_parent_before_they_answer(monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.0)
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as answers, os.fdopen(writer, "wb") as worker, open(os.devnull, "wb") as nothing:
        worker_process._send_progress(worker, ("prior of north", 3, 20))
        worker_process.write_frame(worker, pack({"failed": None}, [b"reply"]))
        parent = object.__new__(WorkerProcess)
        parent._spec = ""
        parent._process = SimpleNamespace(stdin=nothing, stdout=answers)
        told = []
        with listening(lambda *one: told.append(one)):
            answer = parent._converse(b"message")
    assert told == [("prior of north", 3, 20)]
    assert unpack(answer) == ({"failed": None}, [b"reply"])
