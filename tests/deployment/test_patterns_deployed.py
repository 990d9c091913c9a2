"""Every pattern of messages between deployed sites: the models that sites end up with are those of one process."""

import pytest
import torch
from json_schemas import assert_valid
from processes import free_port, polyclinic
from safetensors.torch import load_file

pytest.importorskip("nvflare", reason="the extra [nvflare] is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

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
def deployment(tiny, tmp_path_factory):
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
def test_sites_end_with_the_models_of_one_process(deployment, tiny, undisturbed, tmp_path, case):
    study = study_of(tiny, case)
    (tmp_path / "study.toml").write_text(study.to_toml())
    name = case.replace(" ", "-")
    polyclinic("deploy", "submit", tmp_path / "study.toml", "-d", deployment, "--name", name)
    for site in SITES:
        assert_valid(deployment / "sites" / site / "runs" / name)
        here = model_at(undisturbed(study).folder, site)
        there = load_file(deployment / "sites" / site / "runs" / name / "model.safetensors")
        assert there.keys() == here.keys()
        assert all(torch.equal(there[name], here[name]) for name in here)
