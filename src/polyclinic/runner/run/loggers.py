"""Curves of a run for TensorBoard, MLflow and Weights & Biases: the table `[logging]` of a study.

They get what the coordinator writes into `history.jsonl` and `result.json` and nothing else: no image, no weights, no
single image's score. Sites write no logs. All of it stays on this machine: MLflow writes a local database, W&B works
offline, and both are told to collect nothing about the machine. Logs are made from the history: a resumed run writes
them anew.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from polyclinic.errors import Notice
from polyclinic.json_types import JsonMapping, parse_json
from polyclinic.runner.run.recorder import RoundLog
from polyclinic.study import Study

FOLDER = "logs"
#: tables of a study that are logged as settings: they hold no paths and no names of files
LOGGED_TABLES = ("method", "task", "optimizer", "evaluation")


#: what MLflow takes at once
MOST_METRICS, MOST_PARAMS = 1000, 100


class Logger(ABC):
    """Where curves go. One subclass per package."""

    package: ClassVar[str]
    extra: ClassVar[str]

    @abstractmethod
    def __init__(self, folder: Path, run: str, settings: Mapping[str, str]) -> None:
        """Begin a log in a folder of its own, which is new."""

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Figures of a round."""

    @abstractmethod
    def close(self) -> None: ...


class TensorBoard(Logger):
    package, extra = "tensorboard", "logging"

    def __init__(self, folder: Path, run: str, settings: Mapping[str, str]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder))
        self.writer.add_text("settings", "\n".join(f"    {name} = {value}" for name, value in settings.items()))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class MLflow(Logger):
    package, extra = "mlflow", "logging"

    def __init__(self, folder: Path, run: str, settings: Mapping[str, str]) -> None:
        # before the import: it would report that it is used
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = os.environ["DO_NOT_TRACK"] = "true"
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # how it makes its tables
        # a store of this folder, whatever MLFLOW_TRACKING_URI says
        home = folder.resolve()
        self.client = MlflowClient(tracking_uri=f"sqlite:///{home / 'mlflow.db'}")
        experiment = self.client.create_experiment("polyclinic", (home / "artifacts").as_uri())
        self.run = self.client.create_run(experiment, run_name=run).info.run_id
        self.metric = Metric
        for some in _pieces([Param(name, value[:500]) for name, value in settings.items()], MOST_PARAMS):
            self.client.log_batch(self.run, params=some)

    def log(self, values: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        metrics = [self.metric(_mlflow_name(name), value, now, step) for name, value in values.items()]
        for some in _pieces(metrics, MOST_METRICS):
            self.client.log_batch(self.run, metrics=some)

    def close(self) -> None:
        self.client.set_terminated(self.run)


def _pieces(items: list[Any], size: int) -> Iterator[list[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _mlflow_name(name: str) -> str:
    """MLflow takes letters, digits and a few signs only."""
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in name)


class WandB(Logger):
    package, extra = "wandb", "wandb"

    def __init__(self, folder: Path, run: str, settings: Mapping[str, str]) -> None:
        import wandb

        nothing_more = wandb.Settings(
            console="off",
            disable_git=True,
            save_code=False,
            silent=True,
            host="not kept",
            program="polyclinic",
            username="",
            email="",
            x_disable_stats=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        )
        self.run = wandb.init(
            project="polyclinic", name=run, dir=folder, config=dict(settings), mode="offline", settings=nothing_more
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


LOGGERS: dict[str, type[Logger]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


class Loggers(RoundLog):
    """The logs of a run. What goes wrong in one is said once, and that one is left out; the run goes on."""

    def __init__(self, study: Study, folder: Path) -> None:
        self.open: dict[str, Logger] = {}
        settings = _settings(study)
        for name in study.logging.to if study.logging else ():
            kind = LOGGERS[name]
            if find_spec(kind.package) is None:
                _say(
                    f"logging.to: {name} is not installed, and the run goes on without it; "
                    f"pip install 'polyclinic[{kind.extra}]'"
                )
                continue
            with self._saying(name):
                self.open[name] = kind(_new_folder(folder / FOLDER / name), folder.name, settings)
        self._replay(folder / "history.jsonl")

    def _replay(self, history: Path) -> None:
        """The rounds before an interruption."""
        if self.open and history.exists():
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
            with self._saying(name):
                work(logger)

    @contextlib.contextmanager
    def _saying(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a log is not worth a run
            self.open.pop(name, None)
            _say(f"logging.to: {name} failed and is left out ({' '.join(str(error).split())[:200]}); the run goes on")


def figures(line: JsonMapping) -> dict[str, float]:
    """The numbers of a line of the history, by names with slashes."""
    found = {"communication/total_bytes": float(line["total_bytes"]), "time/seconds": float(line["seconds"])}
    scored: Mapping[str, Any] = line.get("validation") or {}
    for group in ("pooled", "mean"):
        found |= {f"validation/{group}/{name}": value for name, value in _numbers(scored.get(group, {}))}
    for site, metrics in scored.get("per_site", {}).items():
        found |= {f"validation/site {site}/{name}": value for name, value in _numbers(metrics)}
    return found


def _numbers(values: Mapping[str, Any]) -> list[tuple[str, float]]:
    return [(n, float(v)) for n, v in values.items() if isinstance(v, int | float) and math.isfinite(v)]


def _settings(study: Study) -> dict[str, str]:
    tables = study.as_tables()
    known = {f"{table}.{n}": str(v) for table in LOGGED_TABLES for n, v in tables.get(table, {}).items()}
    return {"seed": str(study.seed), "model.backbone": study.model.backbone, **known}


def _new_folder(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _say(sentence: str) -> None:
    warnings.warn(sentence, Notice, stacklevel=2)
