"""Rules of replay and of GANs at sites, each by hand."""

from types import SimpleNamespace

import pytest

from polyclinic.methods.fedper import FedPer
from polyclinic.methods.felicia import Felicia
from polyclinic.methods.shared.gan_site import SiteGANs
from polyclinic.methods.shared.generative_replay import Replay, hand_out_front
from polyclinic.methods.shared.method import Method


@pytest.mark.parametrize(
    ("own", "local", "scored"), [("none", {}, True), ("best", {}, False), ("best", {"x": 1}, True)]
)
def test_felicia_scores_networks_that_are_there(monkeypatch, own, local, scored):
    monkeypatch.setattr(Method, "score", lambda *given: {"scored": given[1:]})
    site = SimpleNamespace(state=SimpleNamespace(group=lambda name: local if name == "local" else {}))
    assert bool(Felicia.model_construct().score(site, "part", {}, own)) is scored


@pytest.mark.parametrize(("space", "handed"), [("images", []), ("latents", ["front"])])
def test_frozen_layers_are_handed_out_where_latents_are_replayed(space, handed):
    asked = []
    federation = SimpleNamespace(replay_settings=Replay(space=space), once=lambda name, work: asked.append(name))
    hand_out_front(federation)
    assert asked == handed


def test_each_discriminator_step_has_six_inputs():
    steps = []
    trainer = SimpleNamespace(discriminator_step=lambda *inputs: steps.append(inputs))
    SiteGANs._discriminator_updates(SimpleNamespace(trainer=trainer), list(range(12)))
    assert [step[:3] for step in steps] == [(0, 1, 2), (6, 7, 8)]
    assert [tuple(step[3]) for step in steps] == [(3, 4, 5), (9, 10, 11)]


def test_a_network_without_cuts_has_no_head_of_its_own():
    assert FedPer().head_names(SimpleNamespace(cuts=())) == frozenset()
