"""Logs for TensorBoard, MLflow and W&B: what they hold, what they do not, and a run without the packages."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from processes import wait_for

from polyclinic.errors import Notice
from polyclinic.runner.run import loggers
from polyclinic.runner.run.loggers import Loggers, figures
from polyclinic.runner.run.run import run

LINE = {
    "round": 2,
    "validation": {
        "pooled": {"accuracy": 0.5, "loss": float("nan")},
        "mean": {"accuracy": 0.75},
        "per_site": {"a b": {"accuracy": 1.0}, "c": {}},
    },
    "failed": {"c": "train: patient 17 has no mask"},
    "total_bytes": 100,
    "seconds": 0.5,
}


class Noted:
    """A logger that keeps what it is given."""

    seen: list[Noted] = []  # noqa: RUF012

    def __init__(self, folder, run, settings):
        self.folder, self.settings, self.values, self.closed = folder, settings, {}, 0
        self.seen.append(self)

    def log(self, values, step):
        self.values[step] = {**self.values.get(step, {}), **values}

    def close(self):
        self.closed += 1


@pytest.fixture
def noted(monkeypatch):
    monkeypatch.setattr(Noted, "seen", [])
    monkeypatch.setitem(loggers.LOGGERS, "tensorboard", (Noted, "logging"))
    monkeypatch.setattr(loggers, "find_spec", lambda name: name)
    return Noted.seen


def test_figures_are_the_numbers_of_the_history_and_no_reasons():
    found = figures(LINE)
    assert found == {
        "communication/total_bytes": 100.0,
        "time/seconds": 0.5,
        "validation/pooled/accuracy": 0.5,
        "validation/mean/accuracy": 0.75,
        "validation/site a b/accuracy": 1.0,
    }


def test_a_run_logs_its_rounds_and_the_same_result(tiny, undisturbed, tmp_path, noted):
    plain = tiny("fedavg")
    done = run(plain.with_settings({"logging": {"to": ["tensorboard"]}}), tmp_path / "run")
    assert done["weights_sha256"] == undisturbed(plain)["weights_sha256"]
    [log] = noted
    assert log.closed == 1
    assert log.folder == tmp_path / "run" / "logs" / "tensorboard"
    assert sorted(log.values) == [1, 2, 3]
    assert log.values[3]["test/pooled/accuracy"] == done.metrics["test"]["accuracy"]
    assert log.settings["method.rounds"] == "3"
    assert not any("path" in name or str(tmp_path) in value for name, value in log.settings.items())


def test_a_resumed_run_logs_the_rounds_before_again(tiny, tmp_path, noted):
    (tmp_path / "history.jsonl").write_text('{"round": 1, "validation": null, "total_bytes": 1, "seconds": 2}\n')
    logs = Loggers(tiny("fedavg", {"logging.to": ["tensorboard"]}), tmp_path)
    logs.round_done(LINE)
    assert sorted(noted[0].values) == [1, 2]


def test_a_package_that_is_missing_is_named_with_its_extra(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    with pytest.warns(Notice, match=r"mlflow is not installed, .*; pip install 'polyclinic\[logging\]'"):
        logs = Loggers(tiny("fedavg", {"logging.to": ["mlflow"]}), tmp_path)
    assert not logs.open
    logs.round_done(LINE)
    logs.close()
    assert not (tmp_path / "logs").exists()


def test_a_log_that_fails_is_left_out_and_the_run_goes_on(tiny, tmp_path, noted, monkeypatch):
    def fail(self, values, step):
        raise RuntimeError("disk\nfull")

    monkeypatch.setattr(Noted, "log", fail)
    logs = Loggers(tiny("fedavg", {"logging.to": ["tensorboard"]}), tmp_path)
    with pytest.warns(Notice, match=r"tensorboard failed and is left out \(disk full\)"):
        logs.round_done(LINE)
    logs.round_done(LINE)


def logged(tiny, tmp_path: Path, name: str) -> Path:
    study = tiny("fedavg", {"logging.to": [name]})
    logs = Loggers(study, tmp_path)
    assert list(logs.open) == [name]
    logs.round_done(LINE)
    logs.finish({"test": {"accuracy": 0.25}}, 3)
    folder = tmp_path / "logs" / name
    files = [file for file in folder.rglob("*") if file.is_file() and not file.name.startswith("events.")]
    for file in files:  # TensorBoard puts the name of the machine into the names of its files
        assert socket.gethostname().encode() not in file.read_bytes(), file
        assert b"patient 17" not in file.read_bytes()
    return folder


def test_tensorboard_reads_what_was_logged(tiny, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(logged(tiny, tmp_path, "tensorboard")))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("validation/mean/accuracy")] == [(2, 0.75)]
    assert [(event.step, event.value) for event in found.Scalars("test/pooled/accuracy")] == [(3, 0.25)]


@pytest.mark.slow
def test_mlflow_reads_what_was_logged(tiny, tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    pytest.importorskip("alembic")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # nothing goes there
    folder = logged(tiny, tmp_path, "mlflow")
    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    [found] = client.search_runs([client.get_experiment_by_name("polyclinic").experiment_id])
    assert found.data.metrics["validation/site a b/accuracy"] == 1.0
    assert found.data.metrics["test/pooled/accuracy"] == 0.25
    assert found.data.params["method.name"] == "fedavg"
    assert found.info.status == "FINISHED"


@pytest.mark.slow
def test_mlflow_takes_the_figures_of_many_sites(tmp_path):
    pytest.importorskip("mlflow")
    pytest.importorskip("alembic")
    from mlflow.tracking import MlflowClient

    log = loggers.mlflow(tmp_path, "run", {f"setting {i}": str(i) for i in range(150)})
    log.log({f"site {i}": float(i) for i in range(1500)}, 1)
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    found = client.search_runs([client.get_experiment_by_name("polyclinic").experiment_id])[0].data
    assert (len(found.params), len(found.metrics)) == (150, 1500)


@pytest.mark.slow
def test_wandb_writes_offline(tiny, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "online")  # the study's table decides
    folder = logged(tiny, tmp_path, "wandb")
    [written] = folder.rglob("*.wandb")
    wait_for(lambda: b"accuracy" in written.read_bytes())  # W&B's own process writes on after `finish`
