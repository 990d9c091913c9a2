"""Attack: have what sites hand to each other sent in the clear, or sealed for somebody who does not exist."""

import pytest
import torch
from attacked_site import SITE, ask
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from polyclinic.federation.layers.suspension import Suspensions
from polyclinic.federation.ledger.keys import KitKeys, public_key, seal_box
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import SEALED, Parcel

FEDER = {
    "method": {"name": "feder", "rounds": 2, "buffer": 8},
    "generator": {"name": "dcgan", "steps": 1, "batch_size": 8, "width": 2, "latent": 4},
    "tuning": {"on": False},
    "model__backbone": "lenet5",
    "data__size": 32,
}


@pytest.fixture
def host(kit):
    """The site after it has trained its generator and its model."""
    host = kit.host(**FEDER)
    ask(host, "prepare", 0)
    return host


def test_what_is_for_another_site_is_not_for_the_coordinator(kit, host):
    with pytest.raises(ParcelRejected, match="'hand_over' releases to another site only, sealed"):
        ask(host, "hand_over", model=True)
    sent = ask(host, "hand_over", model=True, to="south")
    assert {parcel.kind for parcel in sent.parcels} == {SEALED}
    assert Suspensions(kit.folder).all() == []


def key_of(private):
    return torch.frombuffer(bytearray(public_key(private)), dtype=torch.uint8)


def test_a_phantom_gets_no_key_and_no_parcel(host, tmp_path):
    """Both ledgers would agree on it: the coordinator sends it to all sites alike."""
    own, south = (
        torch.frombuffer(bytearray(KitKeys(tmp_path / "kit" / "local").public(n)), dtype=torch.uint8)
        for n in (SITE, "south")
    )
    phantom = key_of(X25519PrivateKey.generate())
    agreed = Parcel("keys", {SITE: own, "south": south})
    assert ask(host, "take_keys", parcels={"keys": agreed}).parcels
    for keys in ({SITE: own, "south": south, "phantom": phantom}, {SITE: own, "south": phantom}):
        with pytest.raises(ParcelRejected, match="is not the one that site 'north' has for it"):
            ask(host, "take_keys", parcels={"keys": Parcel("keys", keys)})
    with pytest.raises(ParcelRejected, match="has no key of 'phantom'"):
        ask(host, "hand_over", model=True, to="phantom")


@pytest.fixture
def sealed(tmp_path):
    """A box with two images that site 'south' sealed for 'north' in the run 'run'."""
    sender, mine = KitKeys(tmp_path / "south"), KitKeys(tmp_path / "kit" / "local").public(SITE)
    buffer = Parcel(
        "synthetic-images", {"images": torch.zeros(2, 1, 32, 32, dtype=torch.uint8), "labels": torch.zeros(2)}
    )
    about = {"from": "south", "operation": "hand_over", "kind": "synthetic-images"}
    bound = {**about, "to": SITE, "round": 1, "run": "run"}
    box = seal_box(buffer.encoded, bound, sender=sender.own(""), recipient=mine)
    return Parcel(SEALED, {"box": torch.frombuffer(box, dtype=torch.uint8)}, about)


def test_a_box_is_taken_once(host, sealed):
    """Twice, a model would stand in the queue twice."""
    changed = Parcel(SEALED, {"box": sealed.tensors["box"].clone()}, sealed.metadata)
    changed.tensors["box"][-1] ^= 1
    with pytest.raises(ParcelRejected, match="do not open"):  # which does not use up the true one
        ask(host, "receive", parcels={"synthetic_images": changed})
    ask(host, "receive", parcels={"synthetic_images": sealed})
    with pytest.raises(ParcelRejected, match="was taken before"):
        ask(host, "receive", parcels={"synthetic_images": sealed})


def test_a_box_is_not_taken_in_another_run_of_the_study(kit, sealed):
    """A coordinator kept it, and submits the study again under another name, where nobody has taken it yet."""
    other = kit.host("other", **FEDER)
    ask(other, "prepare", 0)
    with pytest.raises(ParcelRejected, match="do not open"):
        ask(other, "receive", parcels={"synthetic_images": sealed})


def test_a_box_is_not_taken_again_after_the_run_was_put_back(kit, host, sealed):
    """But for the same call in the same state, as an interrupted run repeats it: that tells nothing new."""
    prepared = host.checkpoint()
    ask(host, "receive", parcels={"synthetic_images": sealed})
    host.restore(prepared)
    ask(host, "receive", parcels={"synthetic_images": sealed})
    again = kit.host(**FEDER)
    again.restore({})  # to before the site had trained anything
    with pytest.raises(ParcelRejected, match="was taken before"):
        ask(again, "receive", parcels={"synthetic_images": sealed})


def test_trained_generators_stay_in_the_kit(kit, tmp_path, monkeypatch):
    """Not in the cache of whoever runs the site, where other users' studies might find them."""
    monkeypatch.setenv("POLYCLINIC_CACHE", str(tmp_path / "elsewhere"))
    ask(kit.host(**{**FEDER, "method": {**FEDER["method"], "reuse_generators": True}}), "prepare", 0)
    assert list((kit.folder / "cache" / "generators").glob("*.safetensors"))
    assert not (tmp_path / "elsewhere" / "generators").exists()
