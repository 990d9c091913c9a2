"""FELICIA on StyleGAN2, and on a plug-in's GAN: steps against the same steps written out, what leaves, resume."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from felicia_studies import gan_of
from torch.nn import functional as F

from polyclinic.data.parts import open_site, prepare
from polyclinic.generators.stylegan2.training import Steps
from polyclinic.methods.felicia import Felicia
from polyclinic.methods.shared.central_discriminator import CentralDiscriminator
from polyclinic.randomness import seed_of, torch_rng
from polyclinic.runner.run.run import run
from polyclinic.study import Study
from polyclinic.tasks import Target

CPU = torch.device("cpu")
BATCH, STEPS, ROUNDS = 4, 3, 2
CHANGES = {"data.samples": 60, "generator.name": "stylegan2", "generator.batch_size": BATCH, "generator.ada_images": 20}
SETTINGS = {"steps": STEPS, "rounds": ROUNDS, "weight": 3.0}


def written_out(study: Study) -> dict[str, dict[str, torch.Tensor]]:
    """Both sites' networks after every D_i, then D_p on all synthetic images, then every G_i, step by step."""
    parts = prepare(study.data, study.sites)
    target = Target(classes=tuple(parts.info["classes"]))
    method, models, steps = study.method, {}, {}
    assert isinstance(method, Felicia)
    for name in parts.names:
        seed = seed_of(study.seed, name, "first weights")
        models[name] = study.generator.build(channels=3, size=28, target=target, seed=seed)
    at: Any = SimpleNamespace(generator=study.generator, seed=study.seed)
    at.trainer = SimpleNamespace(target=target, device=CPU, precision="fp32", graphs=False)
    central = CentralDiscriminator(method, at, (1, 3, 28, 28), 2)
    for number in range(1, ROUNDS + 1):
        for name, model in models.items():
            part = open_site(parts.folder, name).train
            images, labels = (torch.from_numpy(np.array(one)) for one in (part.images, part.labels))
            new = model.begin(images, labels, torch_rng(study.seed, name, "gan", number))
            if name in steps:  # optimisers and counts go on from round to round
                for kept in ("of_generator", "of_discriminator", "taken", "_sure"):
                    setattr(new, kept, getattr(steps[name], kept))
            steps[name] = new
        for _ in range(STEPS):
            labels = {name: one.discriminator_half() for name, one in steps.items()}
            fakes = {name: one.make(labels[name]) for name, one in steps.items()}
            seen = torch.cat([fake[..., :28, :28].detach() for fake in fakes.values()])
            site = torch.tensor([0] * BATCH + [1] * BATCH)
            central.step(seen, site, torch.cat(list(labels.values())))
            gradient = 3.0 * central.image_gradient(seen, site, site, torch.cat(list(labels.values()))) / BATCH
            for name, own in zip(steps, gradient.split(BATCH), strict=True):
                steps[name].generator_half(fakes[name], labels[name], F.pad(own, (0, 4, 0, 4)))
    return {name: model.state() for name, model in models.items()}


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"central": "per-class"}, marks=pytest.mark.slow)], ids=["plain", "per class"]
)
def test_steps_are_those_written_out(felicia, undisturbed, options):
    study = felicia(**options)
    result = undisturbed(study)
    assert result["failures"] == []
    for site, wanted in written_out(study).items():
        found = gan_of(result, site)
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=f"{site} {name}")


def test_the_central_term_changes_both_sites_and_their_first_weights_differ(felicia, undisturbed):
    alone, joined = undisturbed(felicia(weight=0.0)), undisturbed(felicia())
    style = "generator.mapping.layers.0.weight"
    firsts = [gan_of(alone, site)[style] for site in ("site-1", "site-2")]
    assert (firsts[0] - firsts[1]).abs().max() > 1  # learning moves this layer by far less
    for site in ("site-1", "site-2"):
        one, other = (gan_of(result, site) for result in (alone, joined))
        assert any(not torch.equal(one[name], other[name]) for name in one if name.startswith("generator."))


def test_its_steps_are_not_recorded_as_cuda_graphs(felicia, monkeypatch, tmp_path):
    """Gradients of the generator come from outside between two halves of a step; recording the rest would fail."""
    recorded = []
    whole = Steps.__init__

    def watch(self, *given, graphs=True, **how):
        recorded.append(graphs)
        whole(self, *given, graphs=graphs, **how)

    monkeypatch.setattr(Steps, "__init__", watch)
    run(felicia(rounds=1, steps=1), tmp_path / "run")
    assert recorded == [False, False]


PLUGIN = str(Path(__file__).with_name("plugin_gan.py"))


@pytest.fixture
def study(tiny):
    def make(**method):
        tables = {"plugins": [PLUGIN], "data.source": "skin-phantom", "data.samples": 60, "sites.count": 2}
        tables |= {"generator.name": "linear-gan", "generator.batch_size": 8}
        quick = {"steps": 3, "rounds": 2, "learner_steps": 1, "images": 8}
        return tiny("felicia", tables, **{**quick, **method})

    return make


@pytest.mark.parametrize("schedule", ["synchronous", "local"])
def test_the_central_term_reaches_its_generator(study, tmp_path, schedule):
    found = []
    for weight in (0.0, 50.0):
        done = run(study(schedule=schedule, exchange_every=1, weight=weight), tmp_path / str(weight))
        assert done["failures"] == []
        found.append(gan_of(done, "site-1")["generator.weight"])
    assert not torch.equal(*found)
