"""FELICIA with stacked sites: the same as one by one up to rounding, through the same gates, also when a site fails."""

from typing import Any

import pytest
import torch
from felicia_studies import gan_of
from run_folders import lines_of

from polyclinic.data.parts import prepare
from polyclinic.federation.call import GateRefused
from polyclinic.federation.layers.gate import Gate
from polyclinic.generators.gan.model import StackedGAN
from polyclinic.methods.shared import site_gans
from polyclinic.methods.shared.site_gans import SiteGANs
from polyclinic.randomness import seed_of
from polyclinic.runner.run.result import Result
from polyclinic.runner.run.run import run
from polyclinic.study import Study
from polyclinic.tasks import Target

SITES = ("site-1", "site-2", "site-3")
CHANGES = {"sites.count": 3, "generator.name": "dcgan"}
SETTINGS = {"weight": 3.0}


@pytest.fixture
def stacked(felicia):
    """A study whose sites are stacked `never` or `always`."""
    return lambda how, tables=None, **method: felicia({"engine.stacked": how, **(tables or {})}, **method)


@pytest.fixture
def built(monkeypatch):
    """How many sites each `SiteGANs` of a run has had."""
    sizes: list[int] = []
    whole = SiteGANs.__init__

    def watch(self, sites, models, **how):
        whole(self, sites, models, **how)
        assert isinstance(self.networks, StackedGAN) == (len(sites) > 1)
        sizes.append(len(sites))

    monkeypatch.setattr(SiteGANs, "__init__", watch)
    return sizes


def initial(study: Study, site: str) -> torch.Tensor:
    """All weights of a site's GAN in the beginning."""
    target = Target(classes=tuple(prepare(study.data, study.sites).info["classes"]))
    seed = seed_of(study.seed, site, "first weights")
    return flat(study.generator.build(channels=3, size=28, target=target, seed=seed).state())


def flat(state: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.flatten() for _, t in sorted(state.items()) if t.is_floating_point()])


def check_same(study: Study, one: Result, other: Result, sites: tuple[str, ...] = SITES) -> None:
    """Up to rounding. Adam moves a weight whose gradient is next to nothing by the sign of the rounding, so that single
    weights may differ; all together differ by less than a hundredth of what training has moved."""
    for site in sites:
        start = initial(study, site)
        wanted, found = flat(gan_of(one, site)), flat(gan_of(other, site))
        assert (wanted - start).norm() > 0.05
        assert (found - wanted).norm() < 0.01 * (wanted - start).norm(), site


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "synchronous": ({}, {}),
    "local": ({}, {"schedule": "local", "exchange_every": 2, "towards": "other"}),
    "alone": ({}, {"weight": 0.0}),
    "classes apart": ({"generator.condition": "apart", "generator.balance": True}, {}),
    "classes apart, local": (
        {"generator.condition": "apart", "generator.balance": True},
        {"schedule": "local", "exchange_every": 2},
    ),
    "shared noise": ({"generator.name": "gan", "generator.labels": "even"}, {"shared_noise": True, "wire": "small"}),
}
#: classes apart and local steps are each stacked in a way of their own, too
SLOW = {"classes apart, local"}


@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.slow if way in SLOW else []) for way in WAYS])
@pytest.mark.slow
def test_stacked_sites_learn_what_they_learn_one_by_one(stacked, built, tmp_path, way):
    settings, method = WAYS[way]
    results = [run(stacked(how, settings, **method), tmp_path / how) for how in ("never", "always")]
    assert set(built[: len(built) * 3 // 4]) == {1}
    assert set(built[len(built) * 3 // 4 :]) == {3}
    check_same(stacked("never", settings, **method), *results)
    for site in SITES:
        names = ("round", "operation", "kind", "bytes")[: 3 if way == "shared noise" else 4]
        one, other = ([[line[name] for name in names] for line in lines_of(result, site)] for result in results)
        assert one == other  # but for bytes of compressed images, which hang on their last bit


def test_steps_as_a_cuda_graph_would_replay_them_are_the_same_steps(stacked, monkeypatch, tmp_path):
    """A graph makes the last images once more, with gradients; here it is played call by call."""
    plain = run(stacked("always"), tmp_path / "plain")
    recorded: list[str] = []

    def played(function, name):
        recorded.append(name)
        return function

    monkeypatch.setattr(site_gans, "GraphedFunction", played)
    monkeypatch.setattr(SiteGANs, "__init__", _with_graphs(SiteGANs.__init__))
    check_same(stacked("never"), plain, run(stacked("always"), tmp_path / "graphed"))
    assert len(recorded) == 2  # one graph in each round


def _with_graphs(whole):
    def init(self, sites, models, **how):
        whole(self, sites, models, **how)
        self.graphed = True

    return init


def test_one_sites_refused_parcel_drops_that_site_and_no_other(stacked, monkeypatch, tmp_path):
    """The others go on in the same stack, as they would one by one."""
    whole = Gate.release

    def refuse(self, parcels, *, round, operation, **how):
        if (self.site, operation, round) == ("site-2", "generator_step", 1):
            raise GateRefused("the clerk is ill")
        return whole(self, parcels, round=round, operation=operation, **how)

    monkeypatch.setattr(Gate, "release", refuse)
    results = [run(stacked(how, steps=3, rounds=1), tmp_path / how) for how in ("never", "always")]
    for result in results:
        assert [failure["site"] for failure in result["failures"]] == ["site-2"]
    check_same(stacked("never"), *results, sites=("site-1", "site-3"))


@pytest.mark.parametrize("settings", [
    {"generator.condition": "apart"},  # a batch has any number of images of each class
    {"privacy.on": ["generator"], "generator.labels": "even", "generator.discriminator_norm": "none"},
], ids=["classes in any number", "privacy"])  # fmt: skip
def test_what_does_not_stack_goes_one_by_one(stacked, built, tmp_path, settings):
    private = {"generator.spread": False, "generator.augment": False} if "privacy.on" in settings else {}
    result = run(stacked("always", {**settings, **private}, rounds=1), tmp_path / "run")
    assert result["failures"] == []
    assert set(built) == {1}
