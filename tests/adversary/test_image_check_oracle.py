"""Attack: put a candidate image into the weights, so that "holds images of the site itself" names a member."""

import pytest
import torch
from attacked_site import ask, first_weights

from polyclinic.deployment.deployed_site import FAILED, discreet
from polyclinic.federation.call import GateRefused, Suspended

#: a row of conv3 has as many numbers as an image of 24 x 24, and steps without length leave them there
STUDY = {"model__backbone": "small-cnn", "data__size": 24, "optimizer__lr": 1e-30, "optimizer__momentum": 0.0}


def with_image(weights, image):
    changed = {name: tensor.clone() for name, tensor in weights.items()}
    changed["conv3.weight"][0] = (torch.from_numpy(image.copy()).float() / 255).reshape(64, 3, 3)
    return changed


def test_a_member_in_the_weights_gives_one_bit_and_then_silence(kit):
    host = kit.host(**STUDY)
    weights, image = first_weights(host), host.sites.get("north").data.train.images[0]
    stranger = image[:, ::-1]
    assert ask(host, "train", 1, weights=with_image(weights, stranger)).parcels
    with pytest.raises(GateRefused, match="images of the site itself") as refused:
        ask(host, "train", 2, weights=with_image(weights, image))
    assert discreet(str(kit.folder))(refused.value) == FAILED
    with pytest.raises(Suspended):
        ask(host, "train", 3, weights=with_image(weights, stranger))
