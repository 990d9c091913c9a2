"""Ray: the same bits as in one process, its workers, and what they keep."""

import os
import sys
from pathlib import Path

import psutil
import pytest
from faulty_method import will_hang
from run_folders import assert_same_run, result

from polyclinic.cli import run_app
from polyclinic.engines.ray import RayWorker, Share, SiteActor, prepare_own_ray
from polyclinic.errors import BadInput, Damaged, StorageFailed, WorkFailed
from polyclinic.federation.call import Call, Failure
from polyclinic.federation.ledger.ledger import LedgerBroken
from polyclinic.runner.run import assembly
from polyclinic.runner.run.run import run
from polyclinic.study import load_study

ray = pytest.importorskip("ray", reason="the extra [ray] is not installed")
PLUGIN = [str(Path(__file__).parents[1] / "faulty_method.py")]


@pytest.fixture(scope="module")
def running():
    """One small Ray for all tests of this file, so that each need not start its own."""
    here = str(Path(__file__).parents[1])
    environment = {"PYTHONPATH": os.pathsep.join([here, str(Path(__file__).parent), *sys.path])}
    prepare_own_ray()
    ray.init(
        address="local",  # not one that somebody else runs, or left behind, on this machine
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=96 * 2**20,
        log_to_driver=False,
        runtime_env={"env_vars": environment},
    )
    yield
    ray.shutdown()


def on_ray(study, **engine):
    return study.with_settings({"engine.name": "ray", **{f"engine.{name}": value for name, value in engine.items()}})


#: name of a method: its settings, and the number of actors (each takes seconds to start)
CASES = {
    "fedavg": ({}, "auto"),
    "cwt": ({}, 1),
    "splitnn": ({"local_steps": 2}, "auto"),
    "fedreplay": ({}, 1),
    "scaffold": ({}, 1),
}


# an actor takes three seconds of two cores to start: one method is enough for every change
@pytest.mark.parametrize(
    "method", ["fedavg", *(pytest.param(one, marks=pytest.mark.slow) for one in CASES if one != "fedavg")]
)
def test_same_run_as_in_one_process(tiny, undisturbed, running, tmp_path, method):
    settings, actors = CASES[method]
    study = tiny(method, rounds=2, **settings)
    run(on_ray(study, workers=actors), tmp_path / "run")
    assert_same_run(tmp_path / "run", undisturbed(study).folder)


@pytest.mark.slow
def test_many_sites_take_turns_in_few_actors(tiny, undisturbed, running, tmp_path):
    """Twelve sites with batch-norm layers of their own, in two actors: what a site keeps is still there in its turn."""
    few = {"sites.count": 12, "data.samples": 192, "model.backbone": "small-cnn", "data.validation": 0.0}
    study = tiny("fedbn", few, rounds=2, local_steps=1)
    run(on_ray(study, workers=2), tmp_path / "run")
    assert_same_run(tmp_path / "run", undisturbed(study).folder)


def test_actors_have_the_priority_of_who_starts_them(running):
    """Beside other work, Ray's own choice (15) would leave them next to nothing of a busy machine."""
    assert ray.get(ray.remote(lambda: os.nice(0)).remote()) == os.nice(0)


@pytest.fixture
def trouble(tmp_path):
    (tmp_path / "trouble").mkdir()
    return tmp_path / "trouble"


def test_failed_sites_are_left_out_until_the_next_round(tiny, running, trouble, tmp_path, monkeypatch):
    """One hangs, one raises, one dies. The deadline comes early for the call that is never answered alone."""
    faults = {
        "site-2-2": ("hang", "no answer within the deadline (engine.deadline)"),
        "site-3-3": ("raise", "RuntimeError: the scanner is on fire"),
        "site-1-4": ("die", "the site's process died"),
    }
    for name, (what, _) in faults.items():
        (trouble / name).write_text(what)
    real_call = RayWorker.call

    def call(self, call, deadline):
        assert deadline == 3600.0
        return real_call(self, call, 0.5 if will_hang(trouble, call) else None)

    monkeypatch.setattr(RayWorker, "call", call)
    study = tiny("faulty", {"plugins": PLUGIN}, trouble=str(trouble), rounds=4)
    run(on_ray(study, workers=2, deadline=3600.0), tmp_path / "run")
    failures = result(tmp_path / "run")["failures"]
    assert [f"{failure['site']}-{failure['round']}" for failure in failures] == list(faults)
    for failure, (_, reason) in zip(failures, faults.values(), strict=True):
        assert failure["reason"].startswith(reason)

    for name in faults:
        (trouble / name).write_text("raise")  # which reason it was changes no number
    run(study, tmp_path / "here")
    assert result(tmp_path / "run")["weights_sha256"] == result(tmp_path / "here")["weights_sha256"]


@pytest.mark.slow
def test_a_stopped_run_is_resumed_by_another_engine(tiny, running, trouble, tmp_path):
    study = tiny("faulty", {"plugins": PLUGIN, "engine.on_failure": "stop"}, trouble=str(trouble))
    (trouble / "site-3-2").write_text("die")
    with pytest.raises(WorkFailed, match="site 'site-3' failed in round 2"):
        run(on_ray(study), tmp_path / "run")
    (trouble / "site-3-2").unlink()
    run(study, tmp_path / "run", resume=True)
    run(study, tmp_path / "undisturbed")
    assert_same_run(tmp_path / "run", tmp_path / "undisturbed")


def test_a_machine_without_the_folders_is_named(tiny, running, tmp_path, monkeypatch):
    """As on a cluster whose machines do not share a disk."""
    monkeypatch.setattr(assembly.Assembly, "worker_spec", '{"parts": "/nowhere/parts"}')
    with pytest.raises(WorkFailed, match="does not see '/nowhere/parts'"):
        run(on_ray(tiny("fedavg", {"sites.count": 1}, rounds=1), on_failure="stop"), tmp_path / "run")


@pytest.mark.parametrize(("share", "resources", "actors"), [
    (Share(), {"CPU": 2.0}, 2),
    (Share("auto", 4), {"CPU": 16.0}, 4),
    (Share(3), {"CPU": 16.0}, 3),
    (Share(40), {"CPU": 16.0}, 16),
    (Share("auto", 1, 0.25), {"CPU": 64.0, "GPU": 2.0}, 8),
    (Share("auto", 1, 2.0), {"CPU": 64.0, "GPU": 8.0}, 4),
    (Share(), {"CPU": 500.0}, 100),
])  # fmt: skip
def test_actors_fit_onto_the_machines(share, resources, actors):
    assert share.actors_for(100, resources) == actors


def test_an_actor_that_fits_nowhere_is_refused():
    with pytest.raises(BadInput, match=r"engine\.gpus"):
        Share("auto", 1, 0.5).actors_for(3, {"CPU": 8.0})


@pytest.mark.slow
def test_from_the_command_line_ray_is_started_and_ended(tiny, undisturbed, running, tmp_path, monkeypatch):
    """Also in a process that has already read another token, and another home folder, than there are now."""
    ray.shutdown()
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "study.toml").write_text(tiny("fedavg", rounds=1).to_toml())
    code = run_app(["run", str(tmp_path / "study.toml"), "--engine", "ray", "--out", str(tmp_path / "run"), "--quiet"])
    assert code == 0
    assert_same_run(tmp_path / "run", undisturbed(tiny("fedavg", rounds=1)).folder)
    assert load_study(tmp_path / "run" / "study.toml").engine.name == "ray"
    children = [child.name() for child in psutil.Process().children(recursive=True)]
    assert not [name for name in children if "ray" in name], children


def test_an_address_where_nobody_answers_is_bad_input(tiny, tmp_path, capsys):
    ray.shutdown()  # that of the tests above
    (tmp_path / "study.toml").write_text(tiny("fedavg", rounds=1).to_toml())
    flags = ["--engine", "ray", "--address", "127.0.0.1:1", "--out", str(tmp_path / "run"), "--quiet"]
    assert run_app(["run", str(tmp_path / "study.toml"), *flags]) == 2
    assert "engine.address: no Ray cluster answers at '127.0.0.1:1'" in capsys.readouterr().err


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
