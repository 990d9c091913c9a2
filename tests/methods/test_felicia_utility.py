"""What FELICIA's sites release: validation decides, test images come afterwards, each sub-group has its own mark."""

import itertools

import numpy as np
import pytest
import torch
from felicia_studies import state_of
from run_folders import lines_of

from polyclinic.data.parts import ImageSet, open_site, prepare
from polyclinic.federation.site import Site, SiteState
from polyclinic.generators.gan.trainer import centred
from polyclinic.methods.felicia import Felicia
from polyclinic.methods.shared import downstream_utility as utility
from polyclinic.methods.shared.downstream_utility import OWN_SETS, TRAINING_SETS, TrainedNetwork
from polyclinic.runner.run.run import run
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
