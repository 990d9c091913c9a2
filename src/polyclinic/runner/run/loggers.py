"""Curves of a run for TensorBoard, MLflow and Weights & Biases: the table `[logging]` of a study.

They get what the coordinator writes into `history.jsonl` and `result.json` and nothing else: no image, no weights, no
single image's score. Sites write no logs. All of it stays on this machine: MLflow writes a local database, W&B works
offline, and both are told to collect nothing about the machine. Logs are made from the history: a resumed run writes
them anew.
"""

import logging
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from polyclinic.errors import Notice
from polyclinic.json_types import JsonMapping, parse_json
from polyclinic.study import Study

FOLDER = "logs"
#: tables of a study that are logged as settings: they hold no paths and no names of files
LOGGED_TABLES = ("method", "task", "optimizer", "evaluation")
#: what MLflow takes at once
MOST_METRICS, MOST_PARAMS = 1000, 100


class Logger(NamedTuple):
    """An open log: takes the figures of a round, and is closed."""

    log: Callable[[Mapping[str, float], int], None]
    close: Callable[[], None]


def tensorboard(folder: Path, run: str, settings: Mapping[str, str]) -> Logger:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))
    writer.add_text("settings", "\n".join(f"    {name} = {value}" for name, value in settings.items()))

    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return Logger(log, writer.close)


def mlflow(folder: Path, run: str, settings: Mapping[str, str]) -> Logger:
    # before the import: it would report that it is used
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = os.environ["DO_NOT_TRACK"] = "true"
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    logging.getLogger("mlflow").setLevel(logging.WARNING)  # how it makes its tables
    home = folder.resolve()
    client = MlflowClient(tracking_uri=f"sqlite:///{home / 'mlflow.db'}")  # whatever MLFLOW_TRACKING_URI says
    experiment = client.create_experiment("polyclinic", (home / "artifacts").as_uri())
    begun = client.create_run(experiment, run_name=run).info.run_id
    for some in pieces([Param(name, value[:500]) for name, value in settings.items()], MOST_PARAMS):
        client.log_batch(begun, params=some)

    def log(values: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        names = ["".join(c if c.isalnum() or c in "_-. /" else "_" for c in name) for name in values]  # all it takes
        metrics = [Metric(name, value, now, step) for name, value in zip(names, values.values(), strict=True)]
        for some in pieces(metrics, MOST_METRICS):
            client.log_batch(begun, metrics=some)

    return Logger(log, lambda: client.set_terminated(begun))


def pieces(items: list[Any], size: int) -> Iterator[list[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def wandb(folder: Path, run: str, settings: Mapping[str, str]) -> Logger:
    import wandb

    off = ("x_disable_stats", "x_disable_meta", "x_disable_machine_info", "disable_git", "silent")
    nothing = {"host": "not kept", "program": "polyclinic", "username": "", "email": "", "console": "off"}
    quiet = wandb.Settings(**nothing, save_code=False, x_save_requirements=False, **dict.fromkeys(off, True))
    place = {"project": "polyclinic", "name": run, "dir": folder}
    begun = wandb.init(**place, config=dict(settings), mode="offline", settings=quiet)
    return Logger(lambda values, step: begun.log(dict(values), step=step), begun.finish)


#: by the name of the package: what begins a log in a new folder of its own, and the extra that brings it
LOGGERS: dict[str, tuple[Callable[[Path, str, Mapping[str, str]], Logger], str]] = {
    "tensorboard": (tensorboard, "logging"),
    "mlflow": (mlflow, "logging"),
    "wandb": (wandb, "wandb"),
}


class Loggers:
    """The logs of a run. What goes wrong in one is said once, and that one is left out; the run goes on."""

    def __init__(self, study: Study, folder: Path) -> None:
        self.open: dict[str, Logger] = {}
        for name in study.logging.to if study.logging else ():
            begin, extra = LOGGERS[name]
            if find_spec(name) is None:
                cure = f"pip install 'polyclinic[{extra}]'"
                _say(f"logging.to: {name} is not installed, and the run goes on without it; {cure}")
                continue
            try:
                shutil.rmtree(folder / FOLDER / name, ignore_errors=True)
                (folder / FOLDER / name).mkdir(parents=True)
                self.open[name] = begin(folder / FOLDER / name, folder.name, _settings(study))
            except Exception as error:  # a log is not worth a run
                _say_failed(name, error)
        if self.open and (history := folder / "history.jsonl").exists():  # the rounds before an interruption
            for text in history.read_text(encoding="utf-8").splitlines():
                self.round_done(parse_json(text))

    def round_done(self, line: JsonMapping) -> None:
        """Log a line of the history."""
        self._each(lambda logger: logger.log(figures(line), int(line["round"])))

    def finish(self, metrics: JsonMapping, round: int) -> None:
        """Log the final figures, and close."""
        test = {f"test/pooled/{name}": value for name, value in _numbers(metrics.get("test", {}))}
        self._each(lambda logger: logger.log(test, round))
        self.close()

    def close(self) -> None:
        self._each(lambda logger: logger.close())
        self.open.clear()

    def _each(self, work: Callable[[Logger], None]) -> None:
        for name, logger in list(self.open.items()):
            try:
                work(logger)
            except Exception as error:
                del self.open[name]
                _say_failed(name, error)


def figures(line: JsonMapping) -> dict[str, float]:
    """The numbers of a line of the history, by names with slashes."""
    scored: Mapping[str, Any] = line.get("validation") or {}
    groups = {group: scored.get(group, {}) for group in ("pooled", "mean")}
    groups |= {f"site {site}": metrics for site, metrics in scored.get("per_site", {}).items()}
    return {
        "communication/total_bytes": float(line["total_bytes"]),
        "time/seconds": float(line["seconds"]),
        **{f"validation/{group}/{name}": value for group, own in groups.items() for name, value in _numbers(own)},
    }


def _numbers(values: Mapping[str, Any]) -> list[tuple[str, float]]:
    return [(n, float(v)) for n, v in values.items() if isinstance(v, int | float) and math.isfinite(v)]


def _settings(study: Study) -> dict[str, str]:
    tables = study.as_tables()
    known = {f"{table}.{n}": str(v) for table in LOGGED_TABLES for n, v in tables.get(table, {}).items()}
    return {"seed": str(study.seed), "model.backbone": study.model.backbone, **known}


def _say(sentence: str) -> None:
    warnings.warn(sentence, Notice, stacklevel=2)


def _say_failed(name: str, error: Exception) -> None:
    _say(f"logging.to: {name} failed and is left out ({' '.join(str(error).split())[:200]}); the run goes on")
