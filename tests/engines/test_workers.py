"""Any number of worker processes, few sites in memory, growing in mid-run: the same bits and the same ledgers."""

import itertools
import os

import pytest
from processes import ForkedWorker
from run_folders import assert_same_run

from polyclinic.engines import in_process
from polyclinic.federation.host import OpenSites
from polyclinic.runner.run import engines
from polyclinic.runner.run.run import run

KEEP = {"optimizer.keep_state": True}
BATCH_NORM = {"model.backbone": "small-cnn", "sites.count": 3}
STUDIES = {
    "fedavg": ("fedavg", KEEP),
    "fedbn": ("fedbn", BATCH_NORM),
    "cwt": ("cwt", {}),
    "splitnn": ("splitnn", KEEP),
}
MORE = {
    "fedsgd": ("fedsgd", KEEP | {"optimizer.name": "adam"}),
    "fedavg-share": ("fedavg-share", {}),
    "standalone": ("standalone", {"evaluation.select": "best"}),
    "scaffold": ("scaffold", {}),
    "feddyn": ("feddyn", KEEP),
    "fedper": ("fedper", {"evaluation.select": "best"}),
    "finetune": ("finetune", {"evaluation.select": "best"}),
    "local statistics": ("fedprox", BATCH_NORM | {"model.batch_norm": "local", "evaluation.select": "best"}),
}


@pytest.fixture
def forked(monkeypatch):
    """Workers that start at once; the list of those that were started."""
    started = []

    class Counted(ForkedWorker):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(engines, "WorkerProcess", Counted)
    return started


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", STUDIES)
def test_the_number_of_workers_changes_nothing(tiny, undisturbed, forked, tmp_path, name, workers):
    method, settings = STUDIES[name]
    study = tiny(method, settings, rounds=2)
    run(study.with_settings({"engine.workers": workers}), tmp_path / "run")
    assert len(forked) == workers
    assert_same_run(tmp_path / "run", undisturbed(study).folder)


@pytest.mark.parametrize("name", STUDIES | MORE)
def test_growing_into_workers_in_mid_run_changes_nothing(tiny, undisturbed, forked, tmp_path, monkeypatch, name):
    method, settings = (STUDIES | MORE)[name]
    study = tiny(method, settings, rounds=2)
    monkeypatch.setattr(in_process, "PAYS_AFTER", 0.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    begun_here = []
    call_here = in_process.InProcess._call_here
    monkeypatch.setattr(
        in_process.InProcess, "_call_here", lambda self, call: (begun_here.append(call), call_here(self, call))[1]
    )
    run(study.with_settings({"engine.workers": "auto"}), tmp_path / "run")
    assert begun_here
    assert len(forked) == 2
    assert_same_run(tmp_path / "run", undisturbed(study).folder)


@pytest.mark.parametrize(("seconds", "workers"), [(0.5, 0), (1.5, 2)])
def test_only_much_work_grows_into_workers(tiny, undisturbed, forked, tmp_path, monkeypatch, seconds, workers):
    """Six sites, each of whose calls takes so long by a clock that only this test has: round 2 decides."""
    clock = itertools.count(step=seconds)
    monkeypatch.setattr(in_process, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    study = tiny("fedavg", KEEP | {"sites.count": 6, "evaluation.every": 0}, rounds=2)
    run(study.with_settings({"engine.workers": "auto"}), tmp_path / "run")
    assert len(forked) == workers
    assert_same_run(tmp_path / "run", undisturbed(study).folder)


@pytest.mark.parametrize("name", STUDIES | MORE)
def test_few_sites_in_memory_change_nothing(tiny, undisturbed, tmp_path, monkeypatch, name):
    method, settings = (STUDIES | MORE)[name]
    study = tiny(method, settings, rounds=2)
    expected = undisturbed(study).folder
    monkeypatch.setattr(OpenSites, "RESIDENT", 1)
    evicted = []
    pop = OpenSites._save
    monkeypatch.setattr(OpenSites, "_save", lambda self, site: (evicted.append(site.name), pop(self, site))[1])
    run(study, tmp_path / "run")
    assert len(evicted) > 3
    assert_same_run(tmp_path / "run", expected)


def test_a_worker_started_from_the_command_line_gives_the_same_bits(tiny, undisturbed, tmp_path):
    """With a deadline even one worker is a process of its own: `python -m polyclinic.runner.run.worker`."""
    study = tiny("fedavg", KEEP, rounds=2)
    run(study.with_settings({"engine.workers": 1, "engine.deadline": 3600.0}), tmp_path / "run")
    assert_same_run(tmp_path / "run", undisturbed(study).folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_workers_started_from_the_command_line_give_the_same_bits(tiny, undisturbed, tmp_path, name):
    method, settings = STUDIES[name]
    study = tiny(method, settings, rounds=2)
    run(study.with_settings({"engine.workers": 3}), tmp_path / "run")
    assert_same_run(tmp_path / "run", undisturbed(study).folder)
