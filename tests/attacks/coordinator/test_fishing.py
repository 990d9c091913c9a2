"""Fishing: the last layer alone picks out one class, or one image between two bounds, on every classifier."""

import pytest
import torch
from crafted_site import gradient, network, pictures

from polyclinic.attacks.coordinator.crafting import input_of
from polyclinic.attacks.coordinator.fishing import Fishing, change
from polyclinic.attacks.scoring import identified
from polyclinic.errors import BadInput

IMAGES, PUBLIC, OTHERS = pictures(6, 16, 1), pictures(40, 16, 2), pictures(6, 16, 3)
ONE = torch.tensor([0, 0, 0, 0, 1, 0])  # one image of class 1


@pytest.mark.parametrize(("backbone", "norm"), [("small-cnn", "batch"), ("small-cnn", "group"), ("resnet18", "group")])
def test_the_gradient_is_that_of_the_only_image_of_its_class(backbone, norm):
    attack = Fishing(target_class=1)
    crafted = attack.craft(network(backbone, 16, norm), PUBLIC)
    update = gradient(crafted, IMAGES, ONE)
    features = input_of(crafted, "fc")(IMAGES)[4]
    assert torch.allclose(attack.read_features(update, crafted), features, rtol=1e-3, atol=1e-5)
    assert attack.identify(features, crafted, torch.cat([IMAGES, OTHERS])) == 4


def test_without_strength_the_other_images_are_in_it_as_well():
    attack = Fishing(target_class=1, strength=0.1)
    crafted = attack.craft(network("small-cnn", 16), PUBLIC)
    features = input_of(crafted, "fc")(IMAGES)[4]
    found = attack.read_features(gradient(crafted, IMAGES, ONE), crafted)
    assert not torch.allclose(found, features, rtol=0.05)


@pytest.mark.parametrize(("backbone", "size"), [("cnn-32-64-128", 16), ("lenet5", 16)])
def test_where_a_dense_layer_is_the_image_comes_back(backbone, size):
    attack = Fishing(target_class=1, open_convolutions=True)
    crafted = attack.craft(network(backbone, size), PUBLIC)
    found = attack.recover(gradient(crafted, IMAGES, ONE), crafted, PUBLIC)
    scored = identified(found, IMAGES, OTHERS)
    assert (scored.images, scored.by_chance) == (1, 0)


def test_bounds_over_several_rounds_separate_images_of_one_class():
    attack = Fishing(target_class=1, strength=300.0)
    model, labels = network("small-cnn", 16), torch.tensor([0, 1, 0, 1, 1, 1])
    crafted = [attack.craft_cut(model, PUBLIC, share / 25) for share in range(1, 25)]
    updates = [gradient(one, IMAGES, labels) for one in crafted]
    found = set()
    for one, first, second in zip(crafted[1:], updates[:-1], updates[1:], strict=True):
        if attack.count(first, second, one, len(IMAGES)) == pytest.approx(1, abs=0.1):
            features = attack.read_features(change(first, second), one)
            found.add(attack.identify(features, one, torch.cat([IMAGES, OTHERS])))
    assert len(found & set(range(6))) >= 3
    assert not found - set(range(6))


def test_a_class_that_is_not_there_is_named():
    with pytest.raises(BadInput, match="target_class 2 is not one of 0 to 1"):
        Fishing(target_class=2).craft(network("lenet5", 16), PUBLIC)


def test_a_network_for_masks_has_no_last_linear_layer():
    with pytest.raises(BadInput, match="the network has none"):
        Fishing().craft(network("unet", 16), PUBLIC)
