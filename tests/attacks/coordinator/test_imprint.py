"""Imprinting: a linear layer that sorts images into bins gives them back, without any check."""

import pytest
import torch
from crafted_site import gradient, network, pictures, trained

from polyclinic.attacks.attack import Capability, ThreatModel
from polyclinic.attacks.coordinator.crafting import difference
from polyclinic.attacks.coordinator.imprint import Imprint
from polyclinic.attacks.scoring import identified
from polyclinic.errors import BadInput

LABELS = torch.tensor([0, 1, 0, 1, 0, 1])


def attacked(backbone, size, attack, send=gradient):
    """How many of six images come back."""
    images, public, others = pictures(6, size, 1), pictures(60, size, 2), pictures(6, size, 3)
    crafted = attack.craft(network(backbone, size), public)
    return identified(attack.recover(send(crafted, images, LABELS), crafted, public), images, others)


@pytest.mark.parametrize(("backbone", "size"), [("cnn-64-128-64-32", 16), ("cnn-32-64-128", 12), ("lenet5", 16)])
def test_images_come_back(backbone, size):
    found = attacked(backbone, size, Imprint())
    assert found.images >= 4  # five or six
    assert found.by_chance == 0


def test_bins_that_are_alone_give_the_image_to_the_last_digits():
    assert attacked("cnn-64-128-64-32", 16, Imprint()).psnr > 100


def test_a_random_measure_sorts_as_well():
    assert attacked("cnn-64-128-64-32", 16, Imprint(measure="random", seed=1)).images >= 3


def test_few_bins_find_few_images():
    full, weak = (attacked("cnn-64-128-64-32", 16, Imprint(strength=strength)) for strength in (1.0, 0.1))
    assert weak.images < full.images


def test_weights_of_fedavg_do_as_well():
    def send(crafted, images, labels):
        before = {name: weight.detach().clone() for name, weight in crafted.named_parameters()}
        after = trained(crafted, images, labels, steps=2)
        crafted.load_state_dict(before)
        return difference(before, after)

    assert attacked("cnn-64-128-64-32", 16, Imprint(), send).images >= 4


def test_honest_weights_give_nothing():
    images, public = pictures(6, 16, 1), pictures(60, 16, 2)
    honest = network("cnn-64-128-64-32", 16)
    found = Imprint().recover(gradient(honest, images, LABELS), honest, public)
    assert identified(found, images, pictures(6, 16, 3), least=25.0).images == 0


def test_it_needs_weights_of_its_own_choice():
    with pytest.raises(BadInput, match="chosen-weights"):
        Imprint().check(ThreatModel())
    granted = ThreatModel().granted | {Capability.CHOSEN_WEIGHTS, Capability.SIMILAR_IMAGES}
    Imprint().check(ThreatModel(granted=granted))
    assert "since it chose them" in str(Imprint())


def test_one_public_image_is_too_few():
    with pytest.raises(BadInput, match="two images or more"):
        Imprint().craft(network("lenet5", 16), pictures(1, 16))
