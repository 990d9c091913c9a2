"""Defences that a study names: what leaves then, and that everything else stays as it was."""

from __future__ import annotations

import pytest
import torch

from polyclinic.errors import BadInput
from polyclinic.federation.layers import defence as defences
from polyclinic.federation.layers.defence import Defence
from polyclinic.federation.ledger.archive import releases
from polyclinic.federation.ledger.parcel import Parcel

KEEP = {"audit.keep_parcels": 0, "sites.count": 2}


def first_release(result):
    kept = releases(result.folder / "sites" / "site-1" / "kept")
    return next(one for one in kept if one.operation != "evaluate")


def test_only_the_largest_entries_of_a_gradient_leave(tiny, undisturbed):
    plain = first_release(undisturbed(tiny("fedsgd", KEEP, rounds=1)))
    changes = {**KEEP, "defence.name": "sparsify", "defence.keep": 0.05}
    defended = first_release(undisturbed(tiny("fedsgd", changes, rounds=1)))
    expected = defences.sparsify(plain.parcel("gradients").tensors, keep=0.05)
    for name, tensor in defended.parcel("gradients").tensors.items():
        torch.testing.assert_close(tensor, expected[name])
    assert defended.parcel("statistics").digest == plain.parcel("statistics").digest


@pytest.mark.parametrize("name", ["sparsify", "prune", "quantise"])
def test_weights_are_defended_through_their_change(tiny, undisturbed, name):
    plain = first_release(undisturbed(tiny("fedavg", KEEP, rounds=1)))
    defended = first_release(undisturbed(tiny("fedavg", {**KEEP, "defence.name": name}, rounds=1)))
    start = plain.received("weights")
    moved = {n: t - start[n] for n, t in plain.parcel("weights").tensors.items()}
    expected = Defence(name=name).applied(moved)
    for key, tensor in defended.parcel("weights").tensors.items():
        torch.testing.assert_close(tensor - start[key], expected[key], atol=1e-6, rtol=1e-4)
    assert plain.parcel("weights").digest != defended.parcel("weights").digest
    assert defended.parcel("weights").metadata == plain.parcel("weights").metadata


def test_other_kinds_leave_as_they_are():
    parcel = Parcel("latents", {"latents": torch.rand(3)})
    assert Defence(name="prune")(parcel, {}) is parcel
    weights = Parcel("weights", {"w": torch.rand(3)})
    assert Defence(name="prune")(weights, {}) is weights


def test_counters_among_weights_are_left_alone():
    """Batch norm counts its batches in whole numbers; weights that the site was not sent have no difference."""
    start = Parcel("weights", {"w": torch.zeros(4), "n": torch.tensor(3)})
    sent = Parcel("weights", {"w": torch.tensor([4.0, 3.0, 2.0, 1.0]), "n": torch.tensor(300), "own": torch.ones(2)})
    found = Defence(name="prune", fraction=0.5)(sent, {"weights": start}).tensors
    assert found["w"].tolist() == [4, 3, 0, 0]
    assert (found["n"].item(), found["n"].dtype) == (300, torch.int64)
    assert found["own"].tolist() == [1, 1]
    rounded = Defence(name="quantise", bits=2)(sent, {"weights": start}).tensors
    assert rounded["w"].tolist() == [4, 4, 0, 0]  # three levels; half of one rounds to the even one
    assert rounded["n"].dtype == torch.int64


def test_an_unknown_defence_is_said(tiny):
    with pytest.raises(BadInput, match=r"defence\.name"):
        tiny("fedavg", {"defence.name": "prayer"})
