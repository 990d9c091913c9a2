"""Displays of a run: what may be shown while it goes on, and `progress.json`, by which others see how far it is."""

import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

from polyclinic.federation.call import Failure
from polyclinic.files import atomic_write
from polyclinic.json_types import JsonMapping, JsonObject
from polyclinic.study import Study

FILE = "progress.json"
#: seconds between two writes: a method may ask its sites many times a second
PAUSE = 0.5


class Display:
    """Shows a run's progress; this one shows nothing. Override what you want to show."""

    def preparing(self, what: str, done: int, total: int) -> None: ...
    def noted(self, sentence: str) -> None: ...
    def started(self, study: Study, sites: tuple[str, ...], first_round: int) -> None: ...
    def asking(self, operation: str, sites: Sequence[str]) -> None: ...
    def working(self, what: str, done: int, total: int) -> None: ...
    def failed(self, failure: Failure) -> None: ...
    def warned(self, sentence: str) -> None: ...
    def round_done(self, line: JsonMapping, rounds: int) -> None: ...
    def finished(self, result: JsonMapping) -> None: ...


class LiveFile(Display):
    """Keeps the file in the run's folder, and passes everything on to the display that a person sees."""

    def __init__(self, folder: Path, shown: Display) -> None:
        self.path, self.shown = folder / FILE, shown
        self._known: JsonObject = {}
        self._written = 0.0

    def preparing(self, what: str, done: int, total: int) -> None:
        self.shown.preparing(what, done, total)

    def noted(self, sentence: str) -> None:
        self.shown.noted(sentence)

    def started(self, study: Study, sites: tuple[str, ...], first_round: int) -> None:
        self.shown.started(study, sites, first_round)
        rounds = {"round": first_round, "rounds": study.method.rounds}
        self._write(sites=list(sites), metric=study.task.metric, warnings=[], **rounds, **_work("", ()))

    def asking(self, operation: str, sites: Sequence[str]) -> None:
        self.shown.asking(operation, sites)
        self._known |= _work(operation, sites)
        if time.monotonic() - self._written > PAUSE:
            self._write()

    def failed(self, failure: Failure) -> None:
        self.shown.failed(failure)

    def warned(self, sentence: str) -> None:
        self.shown.warned(sentence)
        self._write(warnings=[*self._known.get("warnings", []), sentence])

    def round_done(self, line: JsonMapping, rounds: int) -> None:
        self.shown.round_done(line, rounds)
        self._write(round=min(line["round"] + 1, rounds), rounds=rounds)

    def finished(self, result: JsonMapping) -> None:
        self.remove()
        self.shown.finished(result)

    def remove(self) -> None:
        """A run that ends has nobody at work, however it ends. The file of another run, which is in our way, stays."""
        if self._known:
            self.path.unlink(missing_ok=True)

    def _write(self, **news: object) -> None:
        self._known |= news
        self._written = time.monotonic()
        with contextlib.suppress(OSError):  # a full disk is the run's to report, not that of whoever watches it
            atomic_write(self.path, json.dumps(self._known) + "\n")


def _work(operation: str, sites: Sequence[str]) -> JsonObject:
    return {"operation": operation, "at_work": list(sites), "since": round(time.time(), 1)}
