"""Honest rounds through the incoming check: studies drawn at random over methods, tasks, networks and settings.

Large learning rates, few images, small sites beside large ones, batch norm or group norm, weights from a file and
private training are among them. Every alarm of a site's check is counted, and the run goes on.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polyclinic
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.federation.layers import incoming as inspection
from polyclinic.federation.layers import movement as returning
from polyclinic.federation.layers.calls import TakenCall
from polyclinic.federation.layers.weight_checks import Figure
from polyclinic.methods import METHODS
from polyclinic.randomness import numpy_rng
from polyclinic.runner.recorder import Display

ROUNDS = 30
#: the last round before the one that a site misses, where one is away for a while
BEFORE = 2
#: how a study is named that the check refuses openly, before any work
REFUSED = "refused before the first round"
VQVAE2 = {
    **{"name": "vqvae2", "epochs": 1, "batch_size": 4, "width": 8, "blocks": 1, "top_codes": 8, "bottom_codes": 8},
    **{"prior_epochs": 1, "prior_batch_size": 4, "prior_width": 8, "prior_layers": 1},
}
DCGAN = {"name": "dcgan", "width": 4, "latent": 8, "steps": 4}
#: settings that a method needs to be quick
SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"buffer": 16} for name in ("feder", "feder-a", "feder-b")},
    "felicia": {"steps": 2, "learner_steps": 3, "rounds": 2},
}
TASKS = {
    "classification": (("fundus-phantom", "chest-phantom", "skin-phantom"), ("lenet5", "small-cnn", "cnn-32-64-128")),
    "regression": (("hand-phantom",), ("lenet5", "small-cnn", "cnn-64-128-64-32")),
    "segmentation": (("brain-phantom",), ("unet",)),
}
OPTIMIZERS = (
    {"name": "sgd", "lr": 0.01},
    {"name": "sgd", "lr": 0.05},
    {"name": "adam", "lr": 0.001},
    {"name": "adamw", "lr": 0.001, "keep_state": True},
    {"name": "sgd", "lr": 0.2, "momentum": 0.0},  # large
    {"name": "adam", "lr": 0.003},
    {"name": "adam", "lr": 0.01},  # large: refused before the first round in most networks
)
SITES = (
    {"partition": "iid", "count": 2},
    {"partition": "iid", "count": 4},
    {"partition": "dirichlet", "count": 3, "alpha": 0.5, "min_size": 4},
    {"partition": "quantity", "count": 3},
)


@dataclass
class Seen:
    """What the checks of all sites said: figures by check, the largest beside its limit, and alarms by check. And how
    often a site that came back looked on."""

    figures: Counter[str] = field(default_factory=Counter)
    nearest: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    alarms: list[Figure] = field(default_factory=list)
    looked_on: int = 0

    def take(self, figures: Any, error: type[Exception], cure: str = "") -> None:
        for figure in figures:
            if figure.check == "step" and figure.is_alarm:
                raise error(f"{REFUSED}: {figure}{cure}")
            self.figures[figure.check] += 1
            self.nearest[figure.check] = max(self.nearest[figure.check], figure.value / figure.limit)
            if figure.is_alarm:
                self.alarms.append(figure)

    def looks_on(self, owed: int, limits: Any) -> str:
        self.looked_on += bool(owed)
        return looks_on(owed, limits)


looks_on = returning.looks_on


@contextlib.contextmanager
def counted() -> Iterator[Seen]:
    """Until the block ends, alarms are counted and refuse nothing."""
    seen, refuse = Seen(), inspection.refuse
    inspection.refuse, returning.looks_on = seen.take, seen.looks_on  # type: ignore[assignment]
    try:
        yield seen
    finally:
        inspection.refuse, returning.looks_on = refuse, looks_on


@contextlib.contextmanager
def absent(rounds: int) -> Iterator[None]:
    """Until the block ends, the first site that is called fails in so many rounds, as if it could not be reached."""
    arriving, names = TakenCall.arriving, []

    def away(self: TakenCall, transaction: Any) -> None:
        names.append(transaction.call.site)
        if names[-1] == names[0] and BEFORE < transaction.call.round <= BEFORE + rounds:
            raise WorkFailed("away")
        arriving(self, transaction)

    TakenCall.arriving = away  # type: ignore[method-assign]
    try:
        yield
    finally:
        TakenCall.arriving = arriving  # type: ignore[method-assign]


def tables(number: int) -> dict[str, Any]:
    """The study of this number: methods in turn, all else drawn."""
    rng = numpy_rng(number, "honest study")
    pick = lambda choices: choices[int(rng.integers(len(choices)))]  # noqa: E731
    methods = [name for name in METHODS.builtin if not METHODS[name].traits.needs_encoder]
    method = methods[number % len(methods)]
    possible = METHODS[method].traits.tasks
    usual = ("classification", "classification", "regression", "regression", "classification", "segmentation")
    task = pick([name for name in usual if name in possible])
    backbone = "small-cnn" if method == "fedbn" and task != "segmentation" else pick(TASKS[task][1])
    if task == "classification" and rng.random() < 0.02:
        backbone = "resnet18"
    study: dict[str, Any] = {
        "seed": number,
        "data": {
            "source": pick(TASKS[task][0]),
            "size": 28,
            "samples": pick((24, 40, 80)),
            "validation": 0.2,
            "test": 0.1,
        },
        "sites": dict(pick(SITES)),
        "task": {"name": task},
        "model": {"backbone": backbone, "norm": "batch" if method == "fedbn" else pick(("batch", "group"))},
        "optimizer": {**pick(OPTIMIZERS), "batch_size": pick((4, 8, 16))},
        "method": {"name": method, "rounds": ROUNDS, **SETTINGS.get(method, {})},
        "evaluation": {"every": pick((0, 1, 2)), "select": pick(("last", "best"))},
        "engine": {"workers": 1, "device": "cpu"},
        "policy": {"incoming": {"on": True}},
    }
    if method in ("cwt-replay", "fedavg-replay"):
        study["replay"] = {"probe": False}
    if METHODS[method].model_fields.get("buffer") or method == "felicia":
        study["generator"] = DCGAN
        study["tuning"] = {"on": False}
    elif method in ("cwt-replay", "fedavg-replay"):
        study["generator"] = VQVAE2
    if method in ("fedavg", "fedprox", "cwt", "fedsgd") and study["model"]["norm"] == "group" and rng.random() < 0.2:
        study["privacy"] = {"noise": 1.0}
    study["policy"]["shares"] = pick(("random", "equal"))
    return study


def is_cheap(number: int) -> bool:
    """Whether a round of this study takes less than a second on a CPU: no generator, no large network."""
    study = tables(number)
    return "generator" not in study and study["model"]["backbone"] not in ("unet", "resnet18")


class Watch(Display):
    """Counts rounds, and stops a run as Ctrl-C would: after some round, or when the time is over."""

    def __init__(self, ends: float) -> None:
        self.ends, self.last, self.rounds = ends, math.inf, 0

    def round_done(self, line: Any, rounds: int) -> None:
        self.rounds = line["round"]
        if self.rounds >= self.last or time.time() > self.ends:
            raise KeyboardInterrupt


def run_one(number: int, scratch: str, ends: float = math.inf, rounds: int = ROUNDS, away: int = 0) -> dict[str, Any]:
    """Rounds, figures and alarms of one study, which stops at the clock time `ends`.

    One in seven has weights from a file, one in five is resumed. One site is `away` for so many rounds.
    """
    chosen, watch = tables(number), Watch(ends)
    until = BEFORE + away + 2 + away // 3  # a site that comes back looks on for a while
    chosen["method"]["rounds"] = until if away else min(rounds, chosen["method"]["rounds"])
    row: dict[str, Any] = {"number": number, "method": chosen["method"]["name"], "rounds": 0}
    try:
        with tempfile.TemporaryDirectory(dir=scratch) as folder, counted() as seen, absent(away):
            if number % 7 == 0:
                chosen["model"]["weights"] = _file_of_weights(chosen, Path(folder), Path(scratch))
            study, places = polyclinic.Study(**chosen), {"out": Path(folder) / "run", "cache": Path(scratch) / "cache"}
            if number % 5 == 1:
                watch.last = chosen["method"]["rounds"] // 2
                with contextlib.suppress(KeyboardInterrupt):
                    polyclinic.run(study, display=watch, **places)
                watch.last = math.inf
            with contextlib.suppress(KeyboardInterrupt):
                polyclinic.run(study, display=watch, resume=number % 5 == 1, **places)
        row["rounds"] = watch.rounds
    except (BadInput, WorkFailed) as error:
        row["refused" if REFUSED in str(error) else "failed"] = str(error)[:300]
    row["figures"] = sum(seen.figures.values())
    row["nearest"] = {name: round(value, 3) for name, value in seen.nearest.items()}
    row["alarms"] = [str(figure) for figure in seen.alarms]
    row["looked_on"] = seen.looked_on
    row["optimizer"] = f"{chosen['optimizer']['name']} {chosen['optimizer']['lr']}"
    if seen.alarms:
        row["study"] = {name: chosen[name] for name in ("data", "sites", "model", "optimizer", "task")}
    return row


def _file_of_weights(chosen: dict[str, Any], folder: Path, scratch: Path) -> str:
    """A model that another study trained, for the same network."""
    method = {"name": "fedavg", "rounds": 3}
    kept = {name: chosen[name] for name in ("data", "sites", "task", "model", "engine")}
    optimizer = {"name": "adam", "lr": 0.001, "batch_size": 8}
    study = polyclinic.Study(**kept, seed=chosen["seed"] + 1, optimizer=optimizer, method=method)
    polyclinic.run(study, folder / "before", cache=scratch / "cache")
    return str(folder / "before" / "model.safetensors")


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    nearest: dict[str, float] = defaultdict(float)
    for row in rows:
        for name, value in row["nearest"].items():
            nearest[name] = max(nearest[name], value)
    alarmed = [row for row in rows if row["alarms"] and row["rounds"]]
    rounds: Counter[str] = Counter()
    for row in rows:
        rounds[row["method"]] += row["rounds"]
    return {
        "rounds": sum(rounds.values()),
        "rounds_by_method": dict(rounds),
        "figures": sum(row["figures"] for row in rows),
        "alarms": sum(len(row["alarms"]) for row in rows if row["rounds"]),
        "runs": sum(row["rounds"] > 0 for row in rows),
        "runs_with_alarms": len(alarmed),
        "runs_in_which_a_site_looked_on": sum(row["looked_on"] > 0 for row in rows),
        "runs_refused_before_the_first_round": sum("refused" in row for row in rows),
        "runs_that_failed": sum("failed" in row for row in rows),
        "largest_share_of_a_limit": {name: round(value, 3) for name, value in sorted(nearest.items())},
        "runs_by_optimizer": _by_optimizer(rows),
        "failed": [{k: row[k] for k in ("number", "method", "failed")} for row in rows if "failed" in row],
        "alarmed": [{k: row[k] for k in ("number", "method", "alarms", "study")} for row in alarmed],
    }


def _by_optimizer(rows: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Rounds, and studies with alarms or refused openly, by optimiser and learning rate."""
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        one = found.setdefault(row["optimizer"], {"rounds": 0, "alarmed": 0, "refused": 0})
        one["rounds"] += row["rounds"]
        one["alarmed"] += bool(row["alarms"] and row["rounds"])
        one["refused"] += "refused" in row
    return found
