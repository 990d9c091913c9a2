"""The attack paper's experiment: its networks, the arms by their labels, and who failed, on two small images."""

from __future__ import annotations

import pytest
import torch

from polyclinic.errors import BadInput
from polyclinic_lab import inversions
from polyclinic_lab.rules import parse_sentence


@pytest.fixture
def short(monkeypatch):
    """Two images of noise, and searches of two steps."""
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for name in ("sent", "_attacked"):
        getattr(inversions, name).cache_clear()
    monkeypatch.setattr(inversions, "drawn", lambda data, count: (images, torch.tensor([3, 99])))
    whole = inversions.settings_of
    steps = {"iterations": 2, "trajectory": (1, 2)}
    monkeypatch.setattr(inversions, "settings_of", lambda *given: whole(*given).model_copy(update=steps))
    monkeypatch.setitem(inversions.IMAGES, "lenet", {"quick": 2})


def test_networks_are_the_papers():
    networks = inversions.LeNet(3, 100, 32), inversions.UnstridedResNet18(3, 100, 32)
    assert [sum(one.numel() for one in network.parameters()) for network in networks] == [85_036, 14_445_732]


def test_a_label_says_the_attack():
    fixed = inversions.settings_of("TG, 50", "lenet")
    assert (fixed.start, fixed.variance, fixed.kernel, fixed.scaled) == (
        "transformed-gaussian",
        50,
        "whole-gradient",
        False,
    )
    other = inversions.settings_of("Unif, AG, lr 1", "lenet")
    assert (other.start, other.distance, other.lr, other.returns) == ("uniform", "adaptive-gaussian", 1.0, "last")
    assert inversions.settings_of("TG, Eucl", "resnet").iterations == 5000
    with pytest.raises(BadInput, match="use --scale full"):
        inversions.inverted({"TG, Eucl": []}, "quick", "noise", "resnet")


def test_an_image_fails_by_its_error_after_the_first_step(short):
    found = inversions.inverted({"TG, Eucl": [], "another image": []}, "quick", "noise", "lenet", "curves")
    first, last = found["TG, Eucl", "mse after 1 steps"], found["TG, Eucl", "mse after 2 steps"]
    for place, failed in enumerate(found["TG, Eucl", "failed"]):
        assert (first[place] is None) == bool(failed)  # figures are those of images that came back
        assert failed or last[place] < first[place]
    assert found["another image", "mse"][0] == found["another image", "mse"][1]  # of two, each is the other's


def test_pairs_of_which_one_failed_are_left_out():
    rule = parse_sentence("mse of a is lower than that of b")
    table = {("a", "mse"): [1.0, None, 1.1, 0.9], ("b", "mse"): [2.0, 0.0, 2.2, None]}
    assert rule.judge(table).why.startswith("yes: mse of a is lower than that of b: difference -1.05")


def test_nothing_is_lower_where_no_pair_differs():
    rule = parse_sentence("failed of a is lower than that of b")
    assert rule.judge({("a", "failed"): [0.0, 0.0], ("b", "failed"): [0.0, 0.0]}).word == "undecided"
