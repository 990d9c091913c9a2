"""A coordinator that crafts what it sends (in the spirit of MedLeak), against a secure sum.

Weights of each site's own, which would put the sites' images side by side into the sum, are not added up: the digest of
what a site was asked is in its masks, and in what it signs before the sum is opened. The same crafted weights for all
are answered, and the sum still shows images: against those a site inspects what arrives (docs/incoming.md).
"""

from dataclasses import replace

import pytest
import torch
from company import Company
from torch import nn

from polyclinic.attacks.coordinator import CraftedSum
from polyclinic.attacks.scoring import identified
from polyclinic.errors import WorkFailed
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.sums.settings import Federated
from polyclinic.models import build
from polyclinic.randomness import seeded, torch_rng

NAMES = ("ann", "bo", "cleo")
LABELS = torch.tensor([0, 1, 0, 1])


def pictures(count, seed):
    rng = torch_rng(seed, "pictures")
    coarse = torch.rand(count, 1, 5, 5, generator=rng)
    images = nn.functional.interpolate(coarse, 12, mode="bicubic", align_corners=False).clamp(0, 1)
    return images * (0.4 + 0.6 * torch.rand(count, 1, 1, 1, generator=rng))


def network():
    with seeded(0, "network"):
        return build("cnn-32-64-128", channels=1, outputs=2, size=12, norm="batch")


class Victims(Company):
    """Sites that answer with the gradient of their images at the weights that came."""

    images = {name: pictures(4, seed) for seed, name in enumerate(NAMES, 1)}  # noqa: RUF012

    def answer(self, call):
        model = network()
        model.load_state_dict(dict(call.parcels["weights"].tensors))
        model.train().zero_grad()
        nn.functional.cross_entropy(model(self.images[call.site]), LABELS).backward()
        return {name: weight.grad for name, weight in model.named_parameters()}


@pytest.fixture
def victims(tmp_path):
    return Victims(tmp_path, dict.fromkeys(NAMES, torch.tensor(1.0)), Federated(sum="secure"))


def ask(victims, model):
    [reply] = victims.federation().ask_all("answer", weights=model.state_dict())
    return reply.weights


def test_weights_of_each_sites_own_are_not_added_up(victims):
    attack, public = CraftedSum(sites=3), pictures(60, 9)
    crafted = {name: attack.craft(network(), public, place).state_dict() for place, name in enumerate(NAMES)}
    victims.lie = lambda call: (
        replace(call, parcels={"weights": Parcel("weights", crafted[call.site])})
        if call.operation == "answer"
        else call
    )
    with pytest.raises(WorkFailed, match="1 of the 3 sites that are needed have signed"):
        ask(victims, network())


def test_the_same_crafted_weights_for_all_still_show_images_in_the_sum(victims):
    """What a secure sum does not protect from; the page says so."""
    attack, public = CraftedSum(sites=3, separate=False), pictures(60, 9)
    crafted = attack.craft(network(), public)
    found = attack.recover(ask(victims, crafted), crafted, public)
    shown = identified(found, torch.cat(list(Victims.images.values())), pictures(12, 17))
    assert shown.images >= 3
