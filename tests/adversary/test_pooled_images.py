"""Attack: a study that pools real images, at a site whose policy lists them."""

import pytest
from attacked_site import KINDS, ask

from polyclinic.federation.leaving.gate import Gate, GateRefused
from polyclinic.federation.leaving.ledger import Ledger
from polyclinic.federation.leaving.parcel import Parcel
from polyclinic.federation.leaving.policy import Policy
from polyclinic.federation.leaving.raw_images import RawImages


@pytest.mark.parametrize(("method", "operation"), [("fedavg-share", "give_share"), ("centralized", "give_all")])
def test_no_method_pools_real_images_at_a_deployed_site(kit, method, operation):
    kit.policy(kinds=[*KINDS, "real-images", "labels", "masks"])
    with pytest.raises(GateRefused, match="this exists in simulation only"):
        ask(kit.host(method__name=method), operation, 0)


def test_real_images_stay_whatever_operation_releases_them(tmp_path):
    """A plug-in's operation may declare anything."""
    import torch

    images = torch.randint(0, 255, (2, 1, 8, 8), dtype=torch.uint8)
    policy = Policy(kinds=("real-images",), deployed=True)
    gate = Gate("north", policy, Ledger(tmp_path / "north.jsonl"), RawImages(images.numpy()))
    with pytest.raises(GateRefused, match="real images never leave a deployed site"):
        gate.release([Parcel("real-images", {"images": images})], round=1, operation="share", to="coordinator")
