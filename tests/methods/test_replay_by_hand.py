"""Generative replay by hand: when generators are trained, what sites get, and what is encoded and probed."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from polyclinic.errors import BadInput
from polyclinic.methods.cwt_replay import CwtReplay
from polyclinic.methods.fedper import FedPer
from polyclinic.methods.shared import generative_replay, replay_space
from polyclinic.methods.shared.generative_replay import GenerativeReplay, Replay


@pytest.fixture
def prepared(monkeypatch):
    """The steps that were taken before training."""
    done = []
    monkeypatch.setattr(generative_replay, "hand_out_front", lambda federation: done.append("front"))
    monkeypatch.setattr(generative_replay, "distribute", lambda federation, carried: done.append(f"all: {carried}"))

    def train(federation, site, carried):
        done.append(f"{site} after {carried or 'nobody'}")
        return site

    monkeypatch.setattr(generative_replay, "train_generator_at", train)
    return done


def federation_of(ratio):
    return SimpleNamespace(
        sites=("a", "b"),
        chosen=("a",),
        replay_settings=Replay(ratio=ratio),
        state=lambda **given: SimpleNamespace(**given),
        initial_weights=dict,
        rounds=lambda count, state: range(1, count + 1),
        ask=lambda site, operation, weights: None,
        evaluate=lambda weights: None,
    )


@pytest.mark.parametrize(("ratio", "replays"), [(0.0, False), (0.25, True), (1.0, True)])
@pytest.mark.parametrize("run", [generative_replay.prepare, CwtReplay(rounds=1).run])
def test_generators_go_from_site_to_site_where_anything_is_replayed(prepared, ratio, replays, run):
    run(federation_of(ratio))
    assert prepared == (["front", "a after nobody", "b after a", "all: b"] if replays else [])


def test_the_front_that_is_handed_out_is_that_of_the_first_network():
    asked = []
    trainer = SimpleNamespace(
        load=lambda weights: ("network of", weights),
        split=lambda network: (("front", network), "rest"),
        weights=lambda front: front,
    )
    federation = SimpleNamespace(
        replay_settings=Replay(space="latents"),
        trainer=trainer,
        initial_weights=lambda: "first weights",
        once=lambda name, work: work(),
        ask_all=lambda operation, weights: asked.append((operation, weights)),
    )
    generative_replay.hand_out_front(federation)
    assert asked == [("take_front", ("front", ("network of", "first weights")))]


@pytest.mark.parametrize(("codes", "sampled"), [("prior", True), ("final-encoder", False)])
def test_a_probe_and_a_look_know_whether_images_are_samples(monkeypatch, codes, sampled):
    known = []
    monkeypatch.setattr(generative_replay, "received", lambda site: ("model", {"a": "codes of a", "b": "codes of b"}))
    monkeypatch.setattr(generative_replay, "source", lambda site, model, codes: codes)
    monkeypatch.setattr(replay_space, "probe_images", lambda site, model, by_site, sampled: (by_site, sampled))
    monkeypatch.setattr(replay_space, "measure", lambda site, model, sampled: known.append(sampled))
    site = SimpleNamespace(replay_settings=Replay(codes=codes))
    found = GenerativeReplay.probe_replay(None, site)
    assert found == ({"a": {"a": "codes of a"}, "b": {"b": "codes of b"}}, sampled)
    GenerativeReplay.look_at_replay(None, site)
    assert known == [sampled]


@pytest.mark.parametrize(("dense", "masks", "sent"), [(True, True, True), (False, True, False), (True, False, False)])
def test_masks_are_encoded_for_segmentation(monkeypatch, dense, masks, sent):
    part = SimpleNamespace(labels=np.array([1, 0]), masks=np.ones((2, 2, 2), np.uint8) if masks else None)
    monkeypatch.setattr(generative_replay.replay_space, "learned", lambda site: torch.arange(2))
    site = SimpleNamespace(data=SimpleNamespace(train=part), trainer=SimpleNamespace(task=SimpleNamespace(dense=dense)))
    found = generative_replay.encode(site, SimpleNamespace(encode=lambda images: images + 5))
    assert found.codes.tolist() == [5, 6]
    assert found.labels.tolist() == [1, 0]
    assert (found.masks is not None) is sent


def test_layers_stay_at_a_site_behind_a_cut_that_the_network_has():
    FedPer().check_cuts("lenet5", ("conv1", "conv2"))
    FedPer(personal_after="conv2").check_cuts("lenet5", ("conv1", "conv2"))
    with pytest.raises(BadInput, match=r"personal_after: lenet5 has no cut 'fc'; choose one of conv1, conv2"):
        FedPer(personal_after="fc").check_cuts("lenet5", ("conv1", "conv2"))
