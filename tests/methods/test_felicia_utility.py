"""FELICIA's utility, and with StyleGAN2."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from felicia_studies import gan_of, state_of
from run_folders import lines_of
from torch.nn import functional as F

from polyclinic.data.parts import ImageSet, open_site, prepare
from polyclinic.federation.site import Site, SiteState
from polyclinic.generators.gan.trainer import centred
from polyclinic.generators.stylegan2.training import Steps
from polyclinic.methods.felicia import Felicia
from polyclinic.methods.shared import downstream_utility as utility
from polyclinic.methods.shared.central_discriminator import CentralDiscriminator
from polyclinic.methods.shared.downstream_utility import OWN_SETS, TRAINING_SETS, TrainedNetwork
from polyclinic.randomness import seed_of, torch_rng
from polyclinic.runner.run.run import run
from polyclinic.study import Study
from polyclinic.tasks import Target
from polyclinic.training import private_steps

SETTINGS = {"steps": 1, "rounds": 1, "learner_steps": 2, "weight": 0.0}


@pytest.fixture
def scripted(monkeypatch):
    """Sites' networks as a test wants them: validation scores of each training set, round by round; network k of
    round r has all its weights at k + 10 r."""

    def say(*rounds: dict[str, float]) -> None:
        calls = itertools.count(2)

        def train_networks(site, sets, steps, known):
            number = next(calls) // 2  # two sites in a round
            initial = site.trainer.initial_local
            new = {
                name: TrainedNetwork({n: torch.full_like(t, k + 10 * number) for n, t in initial.items()}, score)
                for k, (name, score) in enumerate(rounds[number - 1].items())
            }
            return {**new, **known}

        monkeypatch.setattr(utility, "train_networks", train_networks)

    return say


def weight_of(state: SiteState, group: str) -> float:
    return float(next(iter(state.group(group).values())).flatten()[0])


@pytest.mark.parametrize(
    ("real", "augmented", "margin", "released"),
    [(0.7, 0.8, 0.0, "augmented"), (0.8, 0.7, 0.0, "real"), (0.7, 0.8, 0.15, "real")],
)
def test_validation_decides_before_a_test_image_is_seen(
    felicia, scripted, monkeypatch, tmp_path, real, augmented, margin, released
):
    scripted({"real": real, "synthetic": 0.99, "augmented": augmented})

    def contrary(site: Site, network: TrainedNetwork) -> float:
        assert "released" in site.state
        return 1 - network.score

    monkeypatch.setattr(utility, "test_score", contrary)
    result = run(felicia(margin=margin), tmp_path / "run")
    assert result["failures"] == []
    for site in ("site-1", "site-2"):
        assert result.metrics["diets"][site]["released"] == released
        state = state_of(result, site)
        assert weight_of(state, "best") == weight_of(state, "local") == 10 + TRAINING_SETS.index(released)


def test_of_several_rounds_each_training_set_keeps_the_best_and_real_images_are_learnt_once(
    felicia, scripted, tmp_path
):
    rounds = [{"real": 0.5, "synthetic": 0.4, "augmented": 0.9}, {"real": 0.99, "synthetic": 0.6, "augmented": 0.7}]
    scripted(*rounds)
    result = run(felicia(rounds=2, weigh_every=1), tmp_path / "run")
    assert [line["sites"]["site-1"]["validation_augmented"] for line in result["worth"]] == [0.9, 0.9]
    assert [line["sites"]["site-1"]["validation_synthetic"] for line in result["worth"]] == [0.4, 0.6]
    assert [line["sites"]["site-1"]["validation_real"] for line in result["worth"]] == [0.5, 0.5]
    state = state_of(result, "site-1")
    assert [weight_of(state, f"diet-{diet}") for diet in OWN_SETS] == [10, 21, 12]
    assert weight_of(state, "best") == 12


def test_scores_are_of_the_split_that_they_name(felicia, monkeypatch, tmp_path):
    monkeypatch.setattr(utility, "score", lambda trainer, part: float(len(part)))
    result = run(felicia(images=17), tmp_path / "run")
    for site, figures in result["worth"][0]["sites"].items():
        counts = result["data"]["counts"][site]
        for diet in OWN_SETS:
            assert figures[f"validation_{diet}"] == counts["validation"] != counts["test"]
            assert figures[f"test_{diet}"] == counts["test"]


def test_sub_groups_make_up_the_whole(felicia, undisturbed):
    study = felicia()
    result, parts = undisturbed(study), prepare(study.data, study.sites)
    groups = np.concatenate([open_site(parts.folder, name).test.subgroup for name in parts.names])
    counts = {str(name): int(np.sum(groups == name)) for name in np.unique(groups)}
    assert len(counts) > 2
    for site in parts.names:
        for diet in OWN_SETS:
            marks = result.metrics["diets"][site][diet]
            right = sum(counts[name] * marks["subgroups"][name]["accuracy"] for name in counts)
            assert right / sum(counts.values()) == pytest.approx(marks["test"]["accuracy"])


def test_a_private_discriminator_takes_its_sites_images_for_real_and_fake_ones_for_fake(felicia, monkeypatch, tmp_path):
    whole, looks = private_steps.take_private_steps, []

    def watch(site, objective, steps, optimizer):
        rows, labels, is_real = objective.fetch(torch.arange(3), torch.arange(3))
        own = site.data.train
        assert torch.equal(rows[is_real], centred(torch.from_numpy(np.asarray(own.images[:3]).copy())))
        assert labels[is_real].tolist() == own.labels[:3].tolist()
        assert int((~is_real).sum()) == objective.joined == 8
        looks.append(site.name)
        return whole(site, objective, steps, optimizer)

    monkeypatch.setattr(private_steps, "take_private_steps", watch)
    result = run(felicia({"privacy.on": ["generator"], "generator.labels": "even"}), tmp_path / "run")
    assert result["failures"] == []
    assert sorted(looks) == ["site-1", "site-2"]


def test_sites_that_share_images_also_learn_from_those_of_all_sites(felicia, monkeypatch, tmp_path):
    given: dict[str, dict[str, ImageSet]] = {}
    whole = utility.train_networks

    def watch(site, sets, steps, known):
        given[site.name] = dict(sets)
        return whole(site, sets, steps, known)

    monkeypatch.setattr(utility, "train_networks", watch)
    study = felicia({"sites.count": 3}, share_images=True, images=10, release="synthetic-all")
    result = run(study, tmp_path / "run")
    assert result["failures"] == []
    shared = [line for line in lines_of(result, "site-1") if line["operation"] == "give_images"]
    assert [line["kind"] for line in shared] == ["synthetic-images"]
    for site, sets in given.items():
        assert list(sets) == list(TRAINING_SETS)
        real, own, of_all = len(sets["real"]), sets["synthetic"], sets["synthetic-all"]
        assert (len(own), len(of_all), len(sets["augmented-all"])) == (10, 30, real + 30)
        assert np.array_equal(of_all.images[:10], own.images)
        assert result.metrics["diets"][site]["released"] == "synthetic-all"
        assert set(result.metrics["diets"][site]) == {*TRAINING_SETS, "released"}
    row = result["worth"][0]["sites"]["site-1"]
    assert {"test_synthetic-all", "validation_augmented-all"} <= row.keys()
    # what a site got besides its own are the images that the other two gave: the same for the third site
    others = [given[name]["synthetic-all"].images[10:] for name in ("site-1", "site-2")]
    assert np.array_equal(others[0][10:], others[1][10:])
    assert not np.array_equal(others[0][:10], others[1][:10])


def test_a_site_that_gets_no_images_of_others_chooses_by_validation(felicia, monkeypatch, tmp_path):
    monkeypatch.setattr(Felicia, "collect_images", lambda self, federation: {})
    result = run(felicia(share_images=True, release="synthetic-all"), tmp_path / "run")
    assert result["failures"] == []
    assert {table["released"] for table in result.metrics["diets"].values()} <= {"real", "augmented"}


CPU = torch.device("cpu")
BATCH, STEPS, ROUNDS = 4, 3, 2
CHANGES = {"data.samples": 60, "generator.name": "stylegan2", "generator.batch_size": BATCH, "generator.ada_images": 20}
STYLED = {"steps": STEPS, "rounds": ROUNDS, "weight": 3.0}


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
