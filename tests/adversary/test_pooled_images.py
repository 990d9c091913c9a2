"""Attack: a study that pools real images, at a site whose policy lists them."""

import pytest
import torch
from attacked_site import KINDS, ask

from polyclinic.federation.call import GateRefused
from polyclinic.federation.layers.gate import Gate, RawImages
from polyclinic.federation.ledger.ledger import Ledger
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.policy import Policy


@pytest.mark.parametrize(("method", "operation"), [("fedavg-share", "give_share"), ("centralized", "give_all")])
def test_no_method_pools_real_images_at_a_deployed_site(kit, method, operation):
    kit.policy(kinds=[*KINDS, "real-images", "labels", "masks"])
    with pytest.raises(GateRefused, match="this exists in simulation only"):
        ask(kit.host(method__name=method), operation, 0)


def test_a_coordinator_does_not_put_images_of_its_own_among_those_a_site_trains_on(kit):
    """It knows all about them: what is left of an update, once they are taken off, is of few patients. And whoever
    chooses what a site learns chooses how far its training moves, by which the incoming check judges weights."""
    host = kit.host(method__name="fedavg-share")
    images, labels = torch.zeros(500, 1, 16, 16, dtype=torch.uint8), torch.zeros(500, dtype=torch.int64)
    parcels = {"real_images": Parcel("real-images", {"images": images}), "labels": Parcel("labels", {"labels": labels})}
    with pytest.raises(GateRefused, match="this exists in simulation only"):
        ask(host, "take_shared", 0, parcels=parcels)
    with pytest.raises(GateRefused, match="this exists in simulation only"):
        ask(host, "train", 1, weights=host.spec.first_weights("north"))


def test_real_images_stay_whatever_operation_releases_them(tmp_path):
    """A plug-in's operation may declare anything."""
    images = torch.randint(0, 255, (2, 1, 8, 8), dtype=torch.uint8)
    policy = Policy(kinds=("real-images",), deployed=True)
    gate = Gate("north", policy, Ledger(tmp_path / "north.jsonl"), RawImages(images.numpy()))
    with pytest.raises(GateRefused, match="real images never leave a deployed site"):
        gate.release([Parcel("real-images", {"images": images})], round=1, operation="share", to="coordinator")
