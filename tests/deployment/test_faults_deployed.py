"""Deployed runs of every pattern of asking, and disturbed ones."""

import json
import os
import signal
import time

import psutil
import pytest
import torch
from json_schemas import assert_valid
from processes import free_port, polyclinic, start_polyclinic, wait_for
from run_folders import history, ledgers, result
from safetensors.torch import load_file

from polyclinic.deployment.processes import Rehearsal

pytest.importorskip("nvflare", reason="the extra [nvflare] is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture
def deployment(tiny, tmp_path):
    study = tiny(
        "fedavg", {"engine.silence": 20.0, "engine.quorum": 0.6}, rounds=40, local_steps=60
    )  # a second or so a round
    (tmp_path / "study.toml").write_text(study.to_toml())
    folder = tmp_path / "deployment"
    polyclinic("deploy", "init", tmp_path / "study.toml", "--out", folder, "--port", free_port())
    try:
        polyclinic("deploy", "up", "--here", "-d", folder)
        yield folder
    finally:
        polyclinic("deploy", "down", "-d", folder)


def rounds(deployment):
    path = deployment / "server" / "runs" / "fedavg-seed0" / "history.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_round(deployment, number):
    wait_for(lambda: len(rounds(deployment)) >= number)


def child_of(site, deployment):
    """The process in which a site trains."""
    tree = psutil.Process(Rehearsal(deployment).running()[site]).children(recursive=True)
    return next(one for one in tree if "polyclinic.deployment.deployed_site" in one.cmdline())


def test_child_site_and_server_are_killed_and_the_run_ends_well(deployment, tiny, undisturbed, tmp_path):
    submit = ["deploy", "submit", tmp_path / "study.toml", "-d", deployment, "--out", tmp_path / "run"]
    watching = start_polyclinic(*submit)
    wait_for_round(deployment, 2)

    child_of("site-1", deployment).kill()
    wait_for(lambda: any("site-1" in line["failed"] for line in rounds(deployment)))
    [died] = [line["failed"]["site-1"] for line in rounds(deployment) if "site-1" in line["failed"]]
    assert "the site's process died (exit code -9)" in died

    os.kill(Rehearsal(deployment).running()["site-2"], signal.SIGKILL)
    wait_for(lambda: rounds(deployment)[-1]["failed"].keys() == {"site-2"})
    assert "the site was stopped" in rounds(deployment)[-1]["failed"]["site-2"]
    polyclinic("deploy", "up", "--here", "site-2", "-d", deployment)
    missed = len(rounds(deployment))
    wait_for(lambda: len(rounds(deployment)) > missed + 1 and not rounds(deployment)[-1]["failed"])

    os.kill(Rehearsal(deployment).running()["server"], signal.SIGKILL)
    kept = rounds(deployment)
    finished = len(kept)
    assert finished < 40
    time.sleep(1)
    polyclinic("deploy", "up", "--here", "-d", deployment)
    output, _ = watching.communicate()  # whoever watched goes on
    assert watching.returncode == 0
    assert "site-2: back again" in output
    assert "the server is back" in output
    assert len(history(tmp_path / "run")) == 40
    assert [line["total_bytes"] for line in rounds(deployment)[: finished - 1]] == [
        line["total_bytes"] for line in kept[: finished - 1]
    ]  # finished rounds were not done again
    failures = {line["site"] for line in result(tmp_path / "run")["failures"]}
    assert failures == {"site-1", "site-2"}
    for site in ("site-1", "site-2", "site-3"):
        assert ledgers(deployment / "sites" / site / "runs" / "fedavg-seed0")


def test_a_restart_of_the_server_that_nobody_saw_is_noticed(deployment, tmp_path):
    """Whoever watches sleeps while the server is killed and started again; NVFlare calls the job running for ever."""
    submit = ["deploy", "submit", tmp_path / "study.toml", "-d", deployment, "--out", tmp_path / "run"]
    watching = start_polyclinic(*submit)
    wait_for_round(deployment, 2)
    watching.send_signal(signal.SIGSTOP)
    try:
        os.kill(Rehearsal(deployment).running()["server"], signal.SIGKILL)
        time.sleep(1)
        polyclinic("deploy", "up", "--here", "-d", deployment)
    finally:
        watching.send_signal(signal.SIGCONT)
    output, _ = watching.communicate(timeout=1200)
    assert watching.returncode == 0, output
    assert "the server is back" in output
    assert len(history(tmp_path / "run")) == 40


pytest.importorskip("nvflare", reason="the extra [nvflare] is not installed")


SITES = ("site-1", "site-2")
DATA = {"data.source": "skin-phantom", "data.samples": 120, "sites.count": 2}
GAN = {"generator.batch_size": 8, "generator.width": 2, "generator.latent": 4}
MADE = {"steps": 2, "learner_steps": 2, "images": 12}

#: name of the case: method, settings of tables, settings of the method
CASES = {
    "cyclic": ("cwt", {}, {}),
    "a message per mini-batch": ("splitnn", {}, {"local_steps": 3}),
    "one upload": ("fedreplay", {}, {}),
    "from site to site": (
        "feder",
        {**GAN, "generator.name": "dcgan", "generator.steps": 2, "tuning.on": False},
        {"buffer": 16},
    ),
    "step by step": ("felicia", {**GAN, "generator.name": "gan"}, {**MADE, "schedule": "synchronous"}),
    "local steps": ("felicia", {**GAN, "generator.name": "gan"}, {**MADE, "schedule": "local", "exchange_every": 1}),
}


def study_of(tiny, case):
    method, settings, of_method = CASES[case]
    return tiny(method, {**DATA, **settings}, rounds=2, **of_method)


@pytest.fixture(scope="module")
def patterned(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("patterns")
    (folder / "study.toml").write_text(study_of(tiny, "cyclic").to_toml())
    kits = folder / "deployment"
    polyclinic("deploy", "init", folder / "study.toml", "-d", kits, "--port", free_port())
    try:
        polyclinic("deploy", "up", "--here", "-d", kits)
        yield kits
    finally:
        polyclinic("deploy", "down", "-d", kits)


def model_at(run, site):
    """A site's model in a run of one process: its own, or the common one."""
    tensors = load_file(run / "model.safetensors")
    own = {name.removeprefix(f"{site}/"): tensor for name, tensor in tensors.items() if name.startswith(f"{site}/")}
    return own or tensors


@pytest.mark.parametrize("case", CASES)
def test_sites_end_with_the_models_of_one_process(patterned, tiny, undisturbed, tmp_path, case):
    study = study_of(tiny, case)
    (tmp_path / "study.toml").write_text(study.to_toml())
    name = case.replace(" ", "-")
    polyclinic("deploy", "submit", tmp_path / "study.toml", "-d", patterned, "--name", name)
    for site in SITES:
        assert_valid(patterned / "sites" / site / "runs" / name)
        here = model_at(undisturbed(study).folder, site)
        there = load_file(patterned / "sites" / site / "runs" / name / "model.safetensors")
        assert there.keys() == here.keys()
        assert all(torch.equal(there[name], here[name]) for name in here)
