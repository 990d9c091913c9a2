"""Crafted layers: the sum of sites' updates still gives images back, with the names of their sites."""

import pytest
import torch
from crafted_site import gradient, network, pictures

from polyclinic.attacks.coordinator.imprint import CraftedSum
from polyclinic.attacks.scoring import identified
from polyclinic.errors import BadInput

SITES = [pictures(4, 12, 1), pictures(4, 12, 5)]
PUBLIC = pictures(60, 12, 2)
LABELS = torch.tensor([0, 1, 0, 1])


def summed(attack):
    """The network that each site got, and the sum of what they sent."""
    crafted = [attack.craft(network("cnn-32-64-128", 12), PUBLIC, site) for site in range(2)]
    sent = [gradient(model, images, LABELS) for model, images in zip(crafted, SITES, strict=True)]
    return crafted, {name: sent[0][name] + sent[1][name] for name in sent[0]}


def test_each_image_comes_back_with_its_site():
    attack = CraftedSum(sites=2)
    crafted, total = summed(attack)
    for site, others in ((0, 1), (1, 0)):
        found = identified(attack.recover(total, crafted[site], PUBLIC, site), SITES[site], SITES[others])
        assert found.images >= 3
        assert found.by_chance == 0  # none of the other site's


def test_sites_with_the_same_weights_share_the_bins():
    attack = CraftedSum(sites=2, separate=False)
    crafted, total = summed(attack)
    assert torch.equal(crafted[0].fc1.weight, crafted[1].fc1.weight)
    found = identified(attack.recover(total, crafted[0], PUBLIC), torch.cat(SITES), pictures(8, 12, 3))
    assert found.images >= 5
    assert found.by_chance == 0


def test_rows_of_sites_do_not_overlap():
    model, attack = network("cnn-32-64-128", 12), CraftedSum(sites=3)
    assert [attack.rows(model, site) for site in range(3)] == [range(42), range(42, 84), range(84, 126)]
    with pytest.raises(BadInput, match="site 3 is not one of 0 to 2"):
        attack.rows(model, 3)
