"""The NVFlare engine in NVFlare's simulator: a server, a process for each site, and the same run as in one process."""

import psutil
import pytest
from run_folders import assert_same_run

from polyclinic.run import run

pytest.importorskip("nvflare", reason="the extra [nvflare] is not installed")

CASES = {
    "fedavg": {},
    "cwt": {},
    "fedreplay": {},
    "feder": {"buffer": 16},
}
SMALL_GAN = {
    "generator.name": "dcgan",
    "generator.steps": 2,
    "generator.batch_size": 8,
    "generator.width": 2,
    "generator.latent": 4,
    "tuning.on": False,
}


def check_same_run(study, undisturbed, folder):
    run(study.with_settings({"engine.name": "nvflare"}), folder)
    assert_same_run(folder, undisturbed(study).folder)
    assert not (folder / ".nvflare").exists()
    names = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    assert not [name for name in names if "nvflare" in name or "polyclinic.worker" in name]


def test_splitnn_sends_every_mini_batch_and_ends_in_the_same_weights(tiny, undisturbed, tmp_path):
    """Names of sites that NVFlare cannot take, too, and what a site holds in memory from call to call."""
    study = tiny("splitnn", {"sites.count": None, "sites.names": ["Graz (A)", "wien"]}, rounds=1, local_steps=3)
    check_same_run(study, undisturbed, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("method", CASES)
def test_same_run_as_in_one_process(tiny, undisturbed, tmp_path, method):
    settings = SMALL_GAN if method == "feder" else {}
    check_same_run(tiny(method, settings, rounds=2, **CASES[method]), undisturbed, tmp_path / "run")
