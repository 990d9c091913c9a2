"""The NVFlare engine in NVFlare's simulator: a server, a process for each site, and the same run as in one process."""

from pathlib import Path

import psutil
import pytest
from run_folders import assert_same_run, history, result

from polyclinic.runner.run.run import run

pytest.importorskip("nvflare", reason="the extra [nvflare] is not installed")
SMALL_GAN = {
    "generator.name": "dcgan",
    "generator.steps": 2,
    "generator.batch_size": 8,
    "generator.width": 2,
    "generator.latent": 4,
    "tuning.on": False,
}
SKIN = {
    "data.source": "skin-phantom",
    "data.samples": 120,
    "sites.count": 2,
    "generator.name": "gan",
    "generator.batch_size": 8,
    "generator.width": 2,
    "generator.latent": 4,
}
QUICK = {"steps": 2, "learner_steps": 2, "images": 12}
#: name of the case: method, settings of tables, settings of the method
CASES = {
    "fedavg": ("fedavg", {}, {}),
    "cwt": ("cwt", {}, {}),
    "fedreplay": ("fedreplay", {}, {}),
    "ditto": ("ditto", {"sites.count": 2}, {}),
    "feder": ("feder", SMALL_GAN, {"buffer": 16}),
    "felicia, step by step": ("felicia", SKIN, {**QUICK, "schedule": "synchronous"}),
    "felicia, local steps": ("felicia", SKIN, {**QUICK, "schedule": "local", "exchange_every": 1}),
}


def check_same_run(study, undisturbed, folder):
    before = set(psutil.Process().children(recursive=True))  # other tests may have left some of theirs
    run(study.with_settings({"engine.name": "nvflare"}), folder)
    expected = undisturbed(study).folder
    if study.method.name == "feder":  # its ledgers hold the sites' public keys, which are drawn anew in every run
        assert result(folder)["weights_sha256"] == result(expected)["weights_sha256"]
        assert history(folder) == history(expected)
    else:
        assert_same_run(folder, expected)
    assert not (folder / ".nvflare").exists()
    left = set(psutil.Process().children(recursive=True)) - before
    names = [" ".join(child.cmdline()) for child in left]
    assert not [name for name in names if "nvflare" in name or "polyclinic.runner.run.worker" in name]


@pytest.mark.slow
def test_splitnn_sends_every_mini_batch_and_ends_in_the_same_weights(tiny, undisturbed, tmp_path):
    """Names of sites that NVFlare cannot take, too, and what a site holds in memory from call to call."""
    study = tiny("splitnn", {"sites.count": None, "sites.names": ["Graz (A)", "wien"]}, rounds=1, local_steps=3)
    check_same_run(study, undisturbed, tmp_path / "run")


@pytest.mark.slow
def test_a_plugin_reaches_server_and_sites(tiny, undisturbed, tmp_path):
    plugin = Path(__file__).parents[1] / "faulty_method.py"
    (tmp_path / "trouble").mkdir()
    settings = {"plugins": [str(plugin)], "sites.count": 2}
    study = tiny("faulty", settings, rounds=1, trouble=str(tmp_path / "trouble"))
    check_same_run(study, undisturbed, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_same_run_as_in_one_process(tiny, undisturbed, tmp_path, case):
    method, settings, of_method = CASES[case]
    check_same_run(tiny(method, settings, rounds=2, **of_method), undisturbed, tmp_path / "run")
