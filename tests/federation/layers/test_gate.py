"""What the gate lets out, what it keeps back, and that what it kept back is nowhere on record."""

import math
from types import SimpleNamespace

import numpy as np
import one_site
import pytest
import torch

from polyclinic.federation.call import Call, GateRefused
from polyclinic.federation.layers.gate import Gate, RawImages, ThroughGate
from polyclinic.federation.ledger.kinds import KINDS
from polyclinic.federation.ledger.ledger import Ledger, verify
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import Transaction, operation
from polyclinic.federation.policy import DEFAULT_KINDS, Policy

SHAPE = (3, 8, 8)


def pictures(seed, count=6, shape=SHAPE):
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


OWN = pictures(1)


@pytest.fixture
def make_gate(tmp_path):
    def make(images=(OWN,), **policy):
        policy = Policy(**{"kinds": tuple(KINDS), **policy})
        return Gate("north", policy, Ledger(tmp_path / "north.jsonl"), RawImages(*images))

    return make


def release(gate, *parcels):
    return gate.release(parcels, round=2, operation="train", to="coordinator")


def refused(gate, *parcels) -> str:
    """The sentence of the refusal, with proof that nothing was written."""
    lines = gate.ledger.position.lines
    with pytest.raises(GateRefused) as refusal:
        release(gate, *parcels)
    assert gate.ledger.position.lines == lines
    assert len(verify(gate.ledger.path) if gate.ledger.path.exists() else []) == lines
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


@pytest.mark.parametrize("kind", ["real-images", "labels", "masks"])
def test_images_labels_and_masks_leave_only_where_a_policy_says_so(make_gate, kind):
    refused(make_gate(kinds=DEFAULT_KINDS), Parcel(kind, {}))
    release(make_gate(kinds=(kind,)), Parcel(kind, {}))


FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_in_a_tensor_stays(make_gate, dtype):
    tensor = torch.ones(4, 4).to(dtype)
    release(make_gate(), Parcel("weights", {"fc.bias": tensor}))
    tensor[3, 3] = torch.tensor(math.nan).to(dtype)
    sentence = refused(make_gate(), Parcel("weights", {"fine": torch.ones(1), "fc.bias": tensor}))
    assert sentence.startswith("site 'north' kept back weights of 'train': tensor 'fc.bias' holds NaN or infinity")


@pytest.mark.parametrize("value", [math.nan, -math.inf, [0.5, math.nan], {"per class": {"a": [math.inf]}}])
def test_nan_in_metadata_stays_however_deep(make_gate, value):
    sentence = refused(make_gate(), Parcel("weights", {"a": torch.ones(1)}, {"samples": 3, "loss": value}))
    assert sentence.startswith("site 'north' kept back weights of 'train': 'loss' is ")


def as_floats(images):
    return torch.from_numpy(images).float() / 255


DISGUISES = {
    "bytes": torch.from_numpy(OWN[2:3]),
    "one image without a batch axis": torch.from_numpy(OWN[2]),
    "floats in [0, 1]": as_floats(OWN[2:3]),
    "float64": as_floats(OWN[2:3]).double(),
    "half precision": as_floats(OWN[2:3]).half(),
    "bfloat16": as_floats(OWN[2:3]).bfloat16(),
    "floats up to 255": torch.from_numpy(OWN[2:3]).float(),
    "whole numbers": torch.from_numpy(OWN[2:3]).long(),
    "among others": torch.cat([as_floats(pictures(5)), as_floats(OWN[2:3]), as_floats(pictures(6))]),
    "beside numbers above 1": torch.cat([3 * torch.randn(4, *SHAPE), as_floats(OWN[2:3])]),
    "with more axes": as_floats(np.stack([pictures(5, 4), OWN[:4]]))[:, None],
    "flattened": as_floats(OWN[2:4]).flatten(1),
    "flattened with the batch": as_floats(OWN[2:3]).flatten(),
    "pixels in a row": as_floats(OWN[2:4]).flatten(2),
    "not contiguous": as_floats(OWN[2:4]).transpose(-1, -2).contiguous().transpose(-1, -2),
    "with a gradient": as_floats(OWN[2:4]).requires_grad_(),
}


@pytest.mark.parametrize("disguise", DISGUISES)
def test_own_images_stay(make_gate, disguise):
    sentence = refused(make_gate(), Parcel("weights", {"fine": torch.ones(2), "conv": DISGUISES[disguise]}))
    assert sentence == "site 'north' kept back weights of 'train': tensor 'conv' holds images of the site itself"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "real-images"])
def test_own_images_stay_whatever_they_are_called(make_gate, kind):
    refused(make_gate(), Parcel(kind, {"x": as_floats(OWN)}))


def test_images_that_were_validated_or_tested_on_are_own_ones_and_others_may_leave(make_gate):
    gate = make_gate(images=(OWN, pictures(2), pictures(3, 0), pictures(4)))
    for seed in (1, 2, 4):
        refused(gate, Parcel("synthetic-images", {"x": as_floats(pictures(seed)[3:4])}))
    release(gate, Parcel("synthetic-images", {"x": as_floats(pictures(3))}))
    others = as_floats(pictures(99))
    assert release(make_gate(), Parcel("synthetic-images", {"x": others}))
    near = as_floats(OWN).clone()
    near[:, 0, 0, 0] = (near[:, 0, 0, 0] + 0.5) % 1
    assert release(make_gate(), Parcel("synthetic-images", {"x": near}))


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_if_one_parcel_stays_all_stay(make_gate, bad):
    """A line in the ledger says that bytes left; the parcel before the refused one did not."""
    gate = make_gate()
    parcels = [
        Parcel("gradients", {"a": torch.ones(2)}),
        Parcel("statistics", {"b": torch.ones(2)}),
        Parcel("labels", {}),
    ]
    parcels[bad] = Parcel(parcels[bad].kind, {"c": torch.tensor(math.nan)})
    refused(gate, *parcels)


class Asked:
    @operation("metrics", "statistics", "latents", "masked")
    def train(self, site): ...

    @operation("statistics", most={"statistics": 2**20})
    def give_sums(self, site): ...


def leaves(gate, parcel, declared=Asked.train):
    """Through the site's gate, after an operation of a site with twenty images of 16 px in each split made it."""
    host = SimpleNamespace(
        spec=SimpleNamespace(policy=gate.policy), sites=SimpleNamespace(gates={"north": gate}), by_reference=False
    )
    transaction = Transaction(Call("north", "train", 1), declared, declared.operation)
    transaction.site, transaction.made = one_site.make_site(), (parcel,)
    return ThroughGate(host).leaving(transaction, (Parcel("masked", {"numbers": torch.ones(3)}),))


def test_images_under_the_name_of_metrics_are_too_many_numbers(make_gate):
    """15 MB of images, scaled to [-1, 1], which the look for raw images does not find; also behind a sum's masks."""
    images = torch.from_numpy(pictures(1, count=320, shape=(3, 128, 128))).float() / 127.5 - 1
    for kind in ("metrics", "statistics"):
        with pytest.raises(GateRefused, match=f"kept back {kind} of 'train': 15728640 numbers, and 'train' declares"):
            leaves(make_gate(), Parcel(kind, {"loss": images}))
        assert leaves(make_gate(), Parcel(kind, {"loss": images.flatten()[: 3 * 2**14]}))
        with pytest.raises(GateRefused, match="at most 49152 of"):
            leaves(make_gate(), Parcel(kind, {"loss": images.flatten()[: 3 * 2**14 + 1]}))
    assert leaves(make_gate(), Parcel("statistics", {"products": torch.ones(2**20)}), Asked.give_sums)
    with pytest.raises(GateRefused, match="at most 1048576 of statistics"):
        leaves(make_gate(), Parcel("statistics", {"products": torch.ones(2**20 + 1)}), Asked.give_sums)
    with pytest.raises(GateRefused, match="of 60 images, where at most 7864320 can be"):
        leaves(make_gate(), Parcel("latents", {"latents": torch.ones(60, 2**18)}))
    with pytest.raises(GateRefused, match="of 60 images, where at most 15360 can be"):
        leaves(make_gate(), Parcel("labels", {"labels": images.flatten()[:15361]}))
    for kind in ("weights", "gradients"):
        with pytest.raises(GateRefused, match=f"kept back {kind} of 'train': 15728640 numbers, where the model and"):
            leaves(make_gate(), Parcel(kind, {"fc.weight": images}))
    with pytest.raises(GateRefused, match="metadata is longer than 1048576 bytes"):
        leaves(make_gate(), Parcel("metrics", {}, {"pixels": [0.25] * 200_000}))
