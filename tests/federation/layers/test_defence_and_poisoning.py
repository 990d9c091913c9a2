"""Defences of updates, and attackers at named sites of a simulation: what they train on and send, by hand."""

import numpy as np
import pytest
import torch

from polyclinic.data.parts import ImageSet, SiteData
from polyclinic.errors import BadInput
from polyclinic.federation.layers.defence_and_poisoning import Defence, Poisoning, patched
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.randomness import torch_rng
from polyclinic.runner.run.run import run


def site(name="north"):
    images = np.zeros((8, 1, 6, 6), np.uint8)
    part = ImageSet(images, np.array([0, 0, 0, 0, 1, 1, 1, 1]))
    return SiteData(name, part, part, part)


def attack(kind, **settings):
    return Poisoning(sites=("north",), attack=kind, **settings)


def test_labels_and_images_of_attackers_alone_are_changed():
    held = attack("label-flip").data(site(), 2, seed=0)
    assert held.train.labels.tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert held.test.labels.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert attack("label-flip").data(site("south"), 2, seed=0).train.labels.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert (attack("label-flip", share=0.5).data(site(), 2, seed=0).train.labels != site().train.labels).sum() == 4
    held = attack("backdoor", target=1, patch=2, share=0.5).data(site(), 2, seed=0)
    marked = held.train.images[:, 0, -1, -1] == 255
    assert marked.sum() == 4
    assert (held.train.labels[marked] == 1).all()
    assert (held.train.images[marked][:, :, :4] == 0).all()
    assert patched(site().test.images, 2).sum() == 8 * 4 * 255


@pytest.mark.parametrize(("kind", "expected"), [("scale", [31.0, 1.0]), ("sign-flip", [-29.0, 1.0])])
def test_updates_are_stretched_or_turned_round(kind, expected):
    sent = {"weights": Parcel("weights", {"w": torch.tensor([1.0, 1.0]), "n": torch.tensor(3)})}
    parcel = Parcel("weights", {"w": torch.tensor([4.0, 1.0]), "n": torch.tensor(4)}, {"samples": 5})
    found = attack(kind).update("north", parcel, sent, 0, 1)
    assert found.tensors["w"].tolist() == expected
    assert found.tensors["n"] == 4
    assert found.metadata == {"samples": 5}
    assert attack(kind).update("south", parcel, sent, 0, 1) is parcel


def test_noise_is_drawn_for_updates_and_what_is_none_stays():
    """Each tensor by itself, in turn from one generator; 3 and 4 have a root mean square of the root of 12.5."""
    sent = Parcel("weights", {"a": torch.tensor([1.0, 2.0]), "n": torch.tensor(1), "b": torch.tensor([0.0])})
    parcel = Parcel("weights", {"a": torch.tensor([4.0, 6.0]), "n": torch.tensor(2), "b": torch.tensor([-5.0])})
    drawn = torch_rng(7, "north", "poisoning", 3)
    first, second = torch.randn(2, generator=drawn), torch.randn(1, generator=drawn)
    found = attack("noise", factor=2.0).update("north", parcel, {"weights": sent}, 7, 3).tensors
    torch.testing.assert_close(found["a"], parcel.tensors["a"] + 2 * 12.5**0.5 * first)
    torch.testing.assert_close(found["b"], parcel.tensors["b"] + 2 * 5 * second)
    assert found["n"] == 2
    # weights of which nothing came, tensors that were not sent, and other kinds
    weights = Parcel("weights", {"w": torch.ones(2), "own": torch.ones(1)})
    assert attack("scale").update("north", weights, {}, 0, 1) is weights
    came = {"weights": Parcel("weights", {"w": torch.zeros(2)})}
    assert attack("scale").update("north", weights, came, 0, 1).tensors["own"].tolist() == [1.0]
    metrics = Parcel("metrics", {"m": torch.ones(2)})
    assert attack("scale").update("north", metrics, came, 0, 1) is metrics
    for kind in ("label-flip", "backdoor"):
        assert attack(kind).update("north", weights, came, 0, 1) is weights
    gradients = Parcel("gradients", {"g": torch.ones(2)})
    assert attack("sign-flip").update("north", gradients, came, 0, 1).tensors["g"].tolist() == [-10.0, -10.0]


@pytest.mark.parametrize(("settings", "words"), [
    ({"poisoning.sites": ["nowhere"], "poisoning.attack": "scale"}, "poisoning.sites: there is no site 'nowhere'"),
    (
        {"poisoning.sites": ["site-1"], "poisoning.attack": "backdoor", "poisoning.target": 9},
        "poisoning.target: there is no class 9",
    ),
    (
        {"poisoning.sites": ["site-1"], "poisoning.attack": "label-flip", "data.source": "hand-phantom"},
        "changes classes, and the",
    ),
])  # fmt: skip
def test_attackers_that_a_study_does_not_have(tiny, tmp_path, settings, words):
    more = {"task": {"name": "regression"}} if "data.source" in settings else {}
    with pytest.raises(BadInput, match=words):
        run(tiny("fedavg", settings | more, rounds=1), tmp_path / "run")


def test_no_deployed_site_is_asked_to_attack(tiny):
    settings = {
        "poisoning.sites": ["site-1"],
        "poisoning.attack": "scale",
        "data": {"source": "at-sites", "dataset": "x", "size": 28},
    }
    with pytest.raises(BadInput, match=r"\[poisoning\]: attackers are for simulations"):
        tiny("fedavg", settings)


def test_a_defence_changes_gradients_and_what_weights_moved_by():
    gradients = Parcel("gradients", {"g": torch.tensor([1.0, -4.0, 2.0, 3.0])}, {"samples": 5})
    kept = Defence(name="sparsify", keep=0.5)(gradients, {})
    assert kept.tensors["g"].tolist() == [0.0, -4.0, 0.0, 3.0]
    assert kept.metadata == {"samples": 5}
    assert Defence(name="prune", fraction=0.25)(gradients, {}).tensors["g"].tolist() == [0.0, -4.0, 2.0, 3.0]
    start = Parcel("weights", {"w": torch.tensor([10.0, 10.0, 10.0])})
    sent = Parcel("weights", {"w": torch.tensor([11.0, 7.0, 12.0]), "n": torch.tensor(3), "own": torch.ones(1)})
    moved = Defence(name="sparsify", keep=1 / 3)(sent, {"weights": start})
    assert {name: one.tolist() for name, one in moved.tensors.items()} == {"w": [10.0, 7.0, 10.0], "n": 3, "own": [1.0]}
    levels = Defence(name="quantise", bits=2)(sent, {"weights": start}).tensors["w"]
    assert levels.tolist() == [10.0, 7.0, 13.0]  # steps of 3: plus and minus the largest, and nothing
    for other in (sent, Parcel("metrics", {"m": torch.ones(2)})):
        assert Defence(name="sparsify")(other, {}) is other
