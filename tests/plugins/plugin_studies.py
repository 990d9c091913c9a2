"""Studies with a plug-in, and how they are run."""

from pathlib import Path

from processes import ForkedWorker

from polyclinic.runner.run import engines
from polyclinic.runner.run.recorder import Display
from polyclinic.study import Study

EVERYTHING = Path(__file__).parents[1] / "plugin_everything.py"
TABLES = {
    "data": {"source": "squares", "size": 16, "samples": 60},
    "sites": {"partition": "in-turn", "count": 3},
    "task": {"name": "smoothed"},
    "model": {"backbone": "one-layer"},
    "optimizer": {"batch_size": 8},
    "method": {"name": "fed-prototypes", "rounds": 2},
    "audit": {"keep_parcels": 1},
    "policy": {"kinds": ["weights", "metrics", "statistics", "prototypes"]},
    "engine": {"workers": 1, "device": "cpu"},
}


def forked(monkeypatch) -> list:
    started = []

    class Noted(ForkedWorker):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(engines, "WorkerProcess", Noted)
    return started


def with_engine(study: Study, **changes) -> Study:
    return study.with_settings({f"engine.{name}": value for name, value in changes.items()})


class StopAfter(Display):
    """Stops a run when a round is done, as Ctrl-C would."""

    def __init__(self, round: int) -> None:
        self.round = round

    def round_done(self, line, rounds):
        if line["round"] == self.round:
            raise KeyboardInterrupt
