"""FedPFT: mixtures by hand, and features drawn from them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.distributions import Normal

from polyclinic.errors import WorkFailed
from polyclinic.federation.call import Reply
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods.fedpft import FedPFT, Mixture, _is_mixture, _received, fit
from polyclinic.randomness import torch_rng
from polyclinic.training.optimizer import Optimizer

ROWS = torch.tensor([[0.0, 1.0], [2.0, 1.0], [10.0, 5.0], [12.0, 7.0]], dtype=torch.float64)


def test_one_component_is_mean_and_variance():
    found = fit(ROWS, 1, 5, torch_rng("fedpft"))
    assert found.means.tolist() == [[6.0, 3.5]]
    assert found.variances.flatten().tolist() == pytest.approx([26.0, 6.75])


def test_densities_by_hand():
    mixture = Mixture(torch.tensor([0.25, 0.75]).double(), ROWS[:2], torch.tensor([[1.0, 2.0], [4.0, 1.0]]).double())
    wanted = Normal(mixture.means, mixture.variances.sqrt()).log_prob(ROWS[:, None]).sum(2) + mixture.shares.log()
    assert torch.allclose(mixture.log_densities(ROWS), wanted)


def test_two_groups_are_found_and_sampled():
    rng = torch_rng("groups")
    groups = torch.cat([torch.randn(60, 2, generator=rng), 20 + torch.randn(20, 2, generator=rng)]).double()
    found = fit(groups, 2, 30, torch_rng("start", 1))
    assert sorted(found.shares.tolist()) == pytest.approx([0.25, 0.75], abs=0.01)
    drawn = found.sample(2000, torch_rng("draw"))
    assert float((drawn[:, 0] > 10).double().mean()) == pytest.approx(0.25, abs=0.04)
    assert drawn[drawn[:, 0] > 10].mean(0).tolist() == pytest.approx([20, 20], abs=0.5)


def test_it_learns_and_warns_of_small_classes(tiny_run, monkeypatch):
    made, make = [], Optimizer.make
    monkeypatch.setattr(Optimizer, "make", lambda self, of, number: made.append(number) or make(self, of, number))
    result = tiny_run({"name": "fedpft", "components": 2, "passes": 10}, optimizer={"name": "adam", "lr": 0.01})
    assert made == list(range(1, 11)), "one pass after the other, and no more"
    assert result.metrics["test"]["accuracy"] > 0.5
    assert set(result["communication"]["by_kind"]) >= {"statistics"}
    assert any("fewer than 10 images of some class" in one for one in result["warnings"])


@pytest.mark.parametrize(
    ("counts", "warned"), [([9, 0], True), ([1, 10], True), ([10, 10], False), ([0, 10], False), ([10, 9], True)]
)
def test_a_class_of_one_to_nine_images_is_warned_of(monkeypatch, counts, warned):
    """As many features are drawn as the site has images, around the mean of their class."""
    warnings, tensors = [], {}
    for label, count in enumerate(counts):
        if count:
            far = {"means": torch.full((1, 2), 100.0 * label), "variances": torch.full((1, 2), 0.01)}
            parts = {"shares": torch.ones(1), **far}
            tensors |= {f"{label}/{name}": part for name, part in parts.items()}
    reply = Reply("north", (Parcel("statistics", tensors, {"counts": counts}),))
    monkeypatch.setattr(FedPFT, "width", lambda self, federation: 2)
    monkeypatch.setattr("polyclinic.methods.fedpft.head_shape", lambda federation: (2, 2))
    federation = SimpleNamespace(ask_all=lambda operation: [reply], warn=warnings.append, rng=torch_rng)
    rows, labels = FedPFT().draw(federation)
    assert bool(warnings) is warned
    assert all(one.startswith("site 'north': it has fewer than 10 images of some class") for one in warnings)
    assert labels.tolist() == [0] * counts[0] + [1] * counts[1]
    assert (rows[:, 0] / 100).round().tolist() == labels.tolist()


@pytest.mark.parametrize(("samples", "fits"), [(7, True), (8, False), (None, False)])
def test_the_images_of_all_classes_are_as_many_as_the_site_says(monkeypatch, samples, fits):
    monkeypatch.setattr(FedPFT, "width", lambda self, federation: 2)
    monkeypatch.setattr("polyclinic.methods.fedpft.head_shape", lambda federation: (2, 2))
    parcel = Parcel("statistics", mixture(torch.ones(1), 2), {"counts": [7, 0], "samples": samples})
    call, reply = SimpleNamespace(operation="give_mixtures"), Reply("north", (parcel,))
    if fits:
        FedPFT().check_reply(None, call, reply)
    else:
        with pytest.raises(ParcelRejected, match="are not 'samples' together"):
            FedPFT().check_reply(None, call, reply)
        FedPFT().check_reply(None, SimpleNamespace(operation="other"), reply)


def mixture(shares, width):
    return {"0/shares": shares, "0/means": torch.ones(1, width), "0/variances": torch.ones(1, width)}


@pytest.mark.parametrize(
    ("tensors", "metadata"),
    [
        ({}, {}),
        ({}, {"counts": [1]}),
        ({"0/shares": torch.ones(1)}, {"counts": [1, 0]}),
        (mixture(torch.ones(1), 3), {"counts": [1, 0]}),
        (mixture(-torch.ones(1), 2), {"counts": [1, 0]}),
    ],
)
def test_what_a_site_sends_is_checked(tensors, metadata):
    with pytest.raises(WorkFailed, match="site 'north' sent no"):
        list(_received(Parcel("statistics", tensors, metadata), "north", 2, 2))


def test_a_class_that_a_site_does_not_have_is_passed_over():
    sent = {name.replace("0/", "1/"): tensor for name, tensor in mixture(torch.ones(1), 2).items()}
    [(label, count, found)] = _received(Parcel("statistics", sent, {"counts": [0, 4]}), "north", 2, 2)
    assert (label, count) == (1, 4)
    assert found.means.tolist() == [[1.0, 1.0]]


def test_what_a_mixture_is():
    half, ones = torch.full((2,), 0.5), torch.ones(2, 3)
    assert _is_mixture(Mixture(half, ones, ones / 2), 3)
    assert _is_mixture(Mixture(torch.tensor([0.0, 1.0]), ones, ones), 3)
    assert not _is_mixture(Mixture(half, ones, 0 * ones), 3)
    assert not _is_mixture(Mixture(torch.ones(1, 1), ones[:1], ones[:1]), 3), "shares are a list"
    assert not _is_mixture(Mixture(half[:0], ones[:0], ones[:0]), 3)
    assert not _is_mixture(Mixture(half, ones, ones), 2)
