"""Trap weights: rows that are alive for one image give it back, without any check."""

import pytest
import torch
from crafted_site import gradient, network, pictures

from polyclinic.attacks.coordinator.crafting import input_of
from polyclinic.attacks.coordinator.imprint import TrapWeights
from polyclinic.attacks.scoring import identified
from polyclinic.errors import BadInput

IMAGES, PUBLIC, OTHERS = pictures(6, 12, 1), pictures(60, 12, 2), pictures(6, 12, 3)


def attacked(attack):
    crafted = attack.craft(network("cnn-32-64-128", 12), PUBLIC)
    update = gradient(crafted, IMAGES, torch.arange(6) % 2)
    return identified(attack.recover(update, crafted, PUBLIC), IMAGES, OTHERS)


def test_images_come_back():
    found = attacked(TrapWeights())
    assert found.images >= 4
    assert found.by_chance == 0


def test_rows_that_are_alive_for_nearly_all_images_mix_them():
    assert attacked(TrapWeights(alive=0.95)).images < attacked(TrapWeights()).images


def test_a_row_is_alive_for_the_share_it_was_set_to():
    crafted = TrapWeights(alive=0.1, strength=0.5).craft(network("cnn-32-64-128", 12), PUBLIC)
    alive = crafted.fc1(input_of(crafted, "fc1")(PUBLIC)) > 0
    assert alive[:, :64].float().mean(0).tolist() == pytest.approx([0.1] * 64, abs=1 / 60)
    assert not alive[:, 64:].any()


def test_tanh_is_never_dead():
    with pytest.raises(BadInput, match="need ReLU"):
        TrapWeights().craft(network("lenet5", 16), pictures(5, 16))


def test_a_network_without_a_layer_that_sees_places_is_named():
    """Also where its convolutions cannot be opened, as those of one pixel in a ResNet."""
    with pytest.raises(BadInput, match="use 'fishing'"):
        TrapWeights().craft(network("resnet18", 16), pictures(4, 16, 2))
