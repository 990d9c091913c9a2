"""Attack: put a run back to its beginning, to have the epsilon that its study sets spent again and again."""

import pytest
from attacked_site import PRIVATE, ask, first_weights

from polyclinic.federation.call import GateRefused
from polyclinic.federation.layers.suspension import Suspensions

TARGET = {**PRIVATE, "target_epsilon": 2.0}


def other_weights(host, number):
    return {name: tensor + 1e-3 * number for name, tensor in first_weights(host).items()}


def test_a_run_that_is_put_back_does_not_spend_its_target_twice(kit):
    host = kit.host(privacy=TARGET)
    spent = ask(host, "train", 1, weights=first_weights(host)).parcels[0].privacy["epsilon"]
    assert 1.0 < spent <= 2.0  # twice this is over the target
    host.restore({})
    with pytest.raises(GateRefused, match=r"and its study sets privacy\.target_epsilon = 2$"):
        ask(host, "train", 1, weights=other_weights(host, 1))
    again = kit.host(privacy=TARGET)  # and so in another process
    with pytest.raises(GateRefused, match="target_epsilon"):
        ask(again, "train", 1, weights=other_weights(again, 2))
    assert Suspensions(kit.folder).all() == []  # steps are counted, and no image is looked at


def test_an_honest_run_reaches_its_target_and_goes_on(kit):
    """Steps that are left are taken, and then none; what leaves then costs nothing more."""
    host = kit.host(privacy=TARGET)
    records = [ask(host, "train", round, weights=other_weights(host, round)).parcels[0].privacy for round in (1, 2, 3)]
    assert records[-1]["epsilon"] <= 2.0
    assert records[0]["steps"] <= records[1]["steps"] <= records[2]["steps"]


def test_the_same_call_after_a_restart_is_free(kit):
    host = kit.host(privacy=TARGET)
    weights = other_weights(host, 0)
    first = ask(host, "train", 1, weights=weights).parcels[0]
    again = kit.host(privacy=TARGET)
    assert ask(again, "train", 1, weights=weights).parcels[0].digest == first.digest
