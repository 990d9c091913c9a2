"""The recorder of a run (validation scores, the best model, `history.jsonl`), and displays: what may be shown while it
goes on, and `progress.json`, by which others see how far it is."""

import contextlib
import functools
import hashlib
import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from polyclinic.errors import Damaged
from polyclinic.federation.call import Failure, Reply
from polyclinic.federation.collaborators import Observer
from polyclinic.federation.federation import Federation, Weights
from polyclinic.federation.sums.coordinator_sums import ALL_SITES
from polyclinic.files import atomic_write, sync_file, write_tensors
from polyclinic.json_types import JsonMapping, JsonObject, parse_json
from polyclinic.runner.run.advice import Watch
from polyclinic.runner.run.loggers import Loggers
from polyclinic.study import Study
from polyclinic.tasks import Task

FILE = "progress.json"
#: seconds between two writes: a method may ask its sites many times a second
PAUSE = 0.5
NOTHING = (-math.inf, -math.inf)  #: the rank of a model before anything was scored


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


class Recorder(Observer):
    """The observer of a federation."""

    def __init__(self, study: Study, folder: Path, *, has_local: bool, display: Display) -> None:
        self.study = study
        self.folder = folder
        self.has_local = has_local
        self.display = display
        self.loggers: Loggers | None = None
        self.best_weights: dict[str, Tensor] | None = None
        self.best_round = 0
        self.leading_round = 0  # the round of the best validation score, whichever is released
        self.scored_round = 0  # the last round that was scored
        self.best_rank = NOTHING
        self._validation: JsonObject | None = None
        self._failures: dict[str, str] = {}
        self.seconds = 0.0  # spent in rounds, those before an interruption included
        self._history = hashlib.sha256()  # of the lines of history.jsonl
        self._noted_history: str | None = None
        self.watch = Watch()

    # --- what the federation tells ----------------------------------------------------------------

    def asking(self, operation: str, sites: Sequence[str]) -> None:
        self.display.asking(operation, sites)

    def failed(self, failure: Failure) -> None:
        self._failures[failure.site] = f"{failure.operation}: {failure.reason}"
        self.display.failed(failure)

    def warned(self, sentence: str) -> None:
        self.display.warned(sentence)

    def evaluate(self, federation: Federation, weights: Weights | None) -> None:
        """Score on the sites' validation images where this round is due; keep the model if it is the best."""
        every, last = self.study.evaluation.every, federation.round == self.study.method.rounds
        if not every or (federation.round % every and not last):
            return
        replies = federation.ask_scores(weights, "validation")
        self._validation = score(self.study.task, replies)
        pooled = (self._validation or {}).get("pooled", {})
        rank = self.study.task.rank(pooled, self.study.evaluation.metric)
        self.scored_round = federation.round
        for sentence in self.watch.scored(self.study.task, replies, pooled):
            federation.warn(sentence)
        if rank is not None and rank > self.best_rank:
            self.best_rank, self.leading_round = rank, federation.round
            self.watch.choose()
            if self.study.evaluation.select == "best":
                self.best_round = federation.round
                self.best_weights = dict(weights) if weights else None
                if self.has_local:
                    federation.ask_all("remember", sites=federation.sites)

    def rounds_without_progress(self, federation: Federation) -> int:
        return self.scored_round - self.leading_round if self.leading_round else 0

    def handed_over(self, federation: Federation, site: str, weights: Weights) -> None:
        """Keep the model as a site hands it over, in `handovers/round-<r>/<turn>-<site>.safetensors`."""
        keep = self.study.evaluation.handovers
        if keep == "none":
            return
        folder = self.folder / "handovers" / f"round-{federation.round}"
        folder.mkdir(parents=True, exist_ok=True)
        turn = federation.sites.index(site) + 1
        write_tensors(folder / f"{turn:03d}-{site}.safetensors", weights, placed=True)
        if keep == "last":
            for old in folder.parent.glob("round-*"):
                if old != folder:
                    shutil.rmtree(old, ignore_errors=True)

    def round_done(self, federation: Federation, rounds: int, seconds: float) -> None:
        self.seconds += seconds
        line = {
            "round": federation.round,
            "validation": self._validation,
            "failed": self._failures,
            "total_bytes": federation.communication.total,
            "seconds": round(seconds, 3),
        }
        text = json.dumps(line) + "\n"
        self._history.update(text.encode())
        with (self.folder / "history.jsonl").open("a", encoding="utf-8") as file:
            file.write(text)
        self._validation, self._failures = None, {}
        if self.loggers:
            self.loggers.round_done(line)
        self.display.round_done(line, rounds)

    # --- checkpoints ------------------------------------------------------------------------------

    def memory(self) -> JsonObject:
        """What a checkpoint must keep, but for the best weights."""
        if (history := self.folder / "history.jsonl").exists() and self.study.engine.durable:
            sync_file(history)  # the checkpoint notes its digest, and must not be on disk before these lines
        score, minus_loss = self.best_rank if self.leading_round else (None, None)
        return {
            "best_round": self.best_round,
            "best_score": score,
            "best_minus_loss": minus_loss,
            "leading_round": self.leading_round,
            "scored_round": self.scored_round,
            "seconds": self.seconds,
            "history_sha256": self._history.hexdigest(),
            "watch": self.watch.memory(),
        }

    def restore(self, memory: JsonMapping, best: dict[str, Tensor] | None) -> None:
        self.best_round = memory["best_round"]
        self.leading_round = memory.get("leading_round", self.best_round)
        self.scored_round = memory.get("scored_round", self.leading_round)
        if memory["best_score"] is not None:
            self.best_rank = (memory["best_score"], memory.get("best_minus_loss") or 0.0)
        self.seconds = memory["seconds"]
        self._noted_history = memory.get("history_sha256")
        self.watch = Watch(memory.get("watch"))
        self.best_weights = best

    def rewind_history(self, round: int) -> None:
        """Drop the lines of rounds that will be done again, and a half-written one. Damaged if a line is another one
        than when the checkpoint was written."""
        path = self.folder / "history.jsonl"
        lines = path.read_bytes().decode(errors="replace").splitlines() if path.exists() else []
        kept = "".join(text + "\n" for text in lines if 0 < _round_of(text) <= round)
        self._history = hashlib.sha256(kept.encode())
        if self._noted_history not in (None, self._history.hexdigest()):
            raise Damaged(
                f"{path}: is damaged: its lines up to round {round} are not those that the run wrote; "
                "bring it back from a copy, or run the study again into another folder"
            )
        atomic_write(path, kept)


def _round_of(text: str) -> int:
    """The round that a line of the history is of; 0 for one that is none."""
    try:
        return int(parse_json(text)["round"])
    except (ValueError, KeyError, TypeError):
        return 0


def score(task: Task, replies: Sequence[Reply]) -> JsonObject | None:
    """Metrics pooled over all images, as a mean over the sites, and of each site; None if no site has images. Where
    scores are added up, the pooled ones are all that is known."""
    sums = {reply.site: dict(reply.metrics) for reply in replies if reply.parcels and reply.metrics}
    if not sums:
        return None
    per_site = {site: task.finish(of_site) for site, of_site in sums.items() if site != ALL_SITES}
    pooled = task.finish(functools.reduce(task.add, sums.values()))
    return {"pooled": pooled, "mean": mean_of(list(per_site.values())), "per_site": per_site}


def mean_of(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over those that have it."""
    found: dict[str, list[float]] = {}
    for one in metrics:
        for name, value in one.items():
            found.setdefault(name, []).append(value)
    return {name: sum(found[name]) / len(found[name]) for name in sorted(found)}
