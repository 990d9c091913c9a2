"""The overflow filter: whether one image is at the site, from whether a number is not finite."""

import pytest
import torch
from crafted_site import gradient, network, pictures

from polyclinic.attacks.coordinator.overflow import OverflowFilter

IMAGES, PUBLIC, OTHERS = pictures(6, 16, 1), pictures(60, 16, 2), pictures(6, 16, 3)


def answers(backbone, candidates, **settings):
    attack = OverflowFilter(**settings)
    crafted = [attack.craft(network(backbone, 16), candidate, PUBLIC) for candidate in candidates]
    return [attack.recover(gradient(model, IMAGES, torch.arange(6) % 2)) for model in crafted]


@pytest.mark.parametrize("backbone", ["lenet5", "cnn-32-64-128", "cnn-64-128-64-32"])
def test_members_overflow_and_others_do_not(backbone):
    assert sum(answers(backbone, IMAGES)) == 6
    assert sum(answers(backbone, OTHERS)) <= 1


def test_small_weights_tell_nothing():
    assert sum(answers("lenet5", IMAGES, strength=1e30)) == 0


def test_a_refusal_is_an_answer():
    assert OverflowFilter().recover(None)
    assert not OverflowFilter().recover({"w": torch.zeros(2)})
