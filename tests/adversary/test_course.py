"""Attack: have weights of the coordinator's choice trained or scored, beside those of the method's own course."""

import pytest
import torch
from attacked_site import ask, first_weights

from polyclinic.federation.leaving.gate import GateRefused
from polyclinic.federation.leaving.parcel import ParcelRejected
from polyclinic.federation.leaving.suspension import Suspensions


def times(weights, factor):
    return {name: factor * tensor for name, tensor in weights.items()}


def test_a_site_trains_once_a_round(kit, monkeypatch):
    host = kit.host()
    weights = first_weights(host)
    assert ask(host, "train", 1, weights=weights).parcels
    monkeypatch.setattr(type(host.spec.trainer), "train", lambda *a: pytest.fail("the site worked nevertheless"))
    for chosen in (weights, times(weights, 2)):
        with pytest.raises(GateRefused, match="'train' has released what it made in round 1 already"):
            ask(host, "train", 1, weights=chosen)
    assert Suspensions(kit.folder).all() == []


def test_a_run_that_is_put_back_trains_a_round_twice_more_at_most(kit):
    """Another site may be missing when an interrupted run goes on, and the weights other ones."""
    host = kit.host()
    weights = first_weights(host)
    first = ask(host, "train", 1, weights=weights).parcels[0].tensors
    host.restore({})
    again = ask(host, "train", 1, weights=weights).parcels[0].tensors  # the same once more, which is no new line
    assert all(torch.equal(first[name], again[name]) for name in first)
    for factor in (2, 3, 4):
        host.restore({})
        if factor < 4:
            assert ask(host, "train", 1, weights=times(weights, factor)).parcels
    host = kit.host()
    ledger = host.sites.open("north") and host.sites.ledgers["north"]
    assert ledger.times(1, "train", "coordinator") == 3


def test_what_a_method_asks_several_times_a_round_it_may(kit):
    kit.policy(kinds=["weights", "activations", "labels", "statistics"], min_cohort=0)
    host = kit.host(method={"name": "splitnn", "rounds": 1})
    front, _ = host.spec.trainer.split(host.spec.trainer.model)
    ask(host, "begin", 1, weights=host.spec.trainer.weights(front))
    assert ask(host, "forward", 1).parcels
    assert ask(host, "forward", 1).parcels


def test_weights_that_were_scored_are_trained_next(kit):
    """Whoever has weights of its choice scored, and others trained, gives itself away."""
    host = kit.host()
    weights = first_weights(host)
    ask(host, "train", 1, weights=weights)
    ask(host, "evaluate", 1, weights=times(weights, 3))
    with pytest.raises(ParcelRejected, match="round 2 are not those that were scored in round 1"):
        ask(host, "train", 2, weights=weights)
    host.restore({})  # which forgets nothing
    with pytest.raises(ParcelRejected, match="are not those that were scored in round 1"):
        ask(host, "train", 2, weights=weights)
    assert ask(host, "train", 2, weights=times(weights, 3)).parcels
