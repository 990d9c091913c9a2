"""Attack: have weights of the coordinator's choice trained or scored, beside those of the method's own course."""

import pytest
import torch
from attacked_site import ask, first_weights

from polyclinic.federation.call import GateRefused
from polyclinic.federation.layers.suspension import Suspensions
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.site import SitePosition


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


def test_a_run_that_is_put_back_again_and_again_answers_three_different_calls(kit):
    """The ledger forgets nothing when the site is put back, in the same process or in a new one."""
    host = kit.host(method={"name": "fedsgd", "rounds": 3})
    weights = first_weights(host)
    for factor in (1, 2, 3, 1, 2, 3):  # those that were answered are answered again, the same
        assert ask(host, "gradient", 1, weights=times(weights, factor)).parcels
        host.restore({})
    for _ in range(2):
        with pytest.raises(GateRefused, match="'gradient' has released what it made in round 1 already"):
            ask(host, "gradient", 1, weights=times(weights, 4))
        host = kit.host(method={"name": "fedsgd", "rounds": 3})
        host.restore({"north": SitePosition(0, 0)})
    assert host.sites.open("north")
    assert host.sites.ledgers["north"].times(1, "gradient", "coordinator") == 3


def test_a_run_that_is_put_back_again_and_again_scores_three_different_weights(kit):
    """Also where the scores are the same: coarse ones of other weights often are."""
    kit.policy(scores="coarse")
    host = kit.host()
    weights = first_weights(host)

    def scored(number):
        host.restore({})
        moved = {**weights, "fc3.bias": weights["fc3.bias"] + 1e-4 * number}
        return ask(host, "evaluate", 1, weights=moved)

    for number in (0, 1, 2, 0, 1, 2):
        assert scored(number).parcels
    with pytest.raises(GateRefused, match="'evaluate' has released its scores of round 1 already"):
        scored(3)


def test_rounds_do_not_go_back(kit):
    host = kit.host()
    weights = first_weights(host)
    ask(host, "train", 2, weights=weights)
    for operation in ("evaluate", "train"):
        with pytest.raises(ParcelRejected, match=f"'{operation}' came for round 1, and round 2 has begun"):
            ask(host, operation, 1, weights=weights)
    host = kit.host()
    host.restore({"north": SitePosition(0, 1)})  # in a new process, that stands where the ledger does
    with pytest.raises(ParcelRejected, match="round 2 has begun"):
        ask(host, "evaluate", 1, weights=weights)
    assert Suspensions(kit.folder).all() == []


def test_after_an_interruption_the_rounds_since_the_checkpoint_come_again(kit):
    host = kit.host()
    weights = first_weights(host)
    ask(host, "train", 1, weights=weights)
    checkpoint = host.checkpoint()
    ask(host, "train", 2, weights=weights)
    ask(host, "train", 3, weights=weights)
    host.restore(checkpoint)
    assert ask(host, "train", 2, weights=weights).parcels
    with pytest.raises(ParcelRejected, match="round 2 has begun"):
        ask(host, "evaluate", 1, weights=weights)


def test_rounds_are_not_left_out_again_and_again_to_score_other_weights(kit):
    """Whoever leaves out the round after every score has other weights scored than are trained."""
    host = kit.host(method={"name": "fedavg", "rounds": 40})
    weights = first_weights(host)
    for number in (1, 3, 5, 7):
        ask(host, "train", number, weights=weights)
        ask(host, "evaluate", number, weights=times(weights, 1 + number))
    with pytest.raises(GateRefused, match="after 4 scored ones were left out, and 3 may be"):
        ask(host, "train", 9, weights=weights)
    with pytest.raises(GateRefused, match="after 4 scored ones were left out"):
        ask(host, "evaluate", 9, weights=weights)
    assert Suspensions(kit.folder).all() == []


def test_a_site_that_is_not_chosen_for_every_round_may_leave_rounds_out(kit):
    host = kit.host(method={"name": "fedavg", "rounds": 8, "fraction": 0.5})
    weights = first_weights(host)
    for number in range(1, 9, 2):
        ask(host, "train", number, weights=weights)
        for scored in (number, number + 1):
            ask(host, "evaluate", scored, weights=times(weights, 1 + scored))
            weights = times(weights, 1 + scored) if scored > number else weights
    assert Suspensions(kit.folder).all() == []


def test_a_run_is_not_put_back_for_other_calls_without_end(kit):
    host = kit.host(method={"name": "fedsgd", "rounds": 30})
    weights = first_weights(host)

    def put_back_and_ask(number, factor):
        host.restore({})
        return ask(host, "gradient", number, weights=times(weights, factor + number / 100))

    for number in range(1, 7):  # two other calls each
        assert all(put_back_and_ask(number, factor).parcels for factor in (1, 2, 3))
    assert put_back_and_ask(7, 1).parcels
    with pytest.raises(GateRefused, match="put back too often"):
        put_back_and_ask(7, 2)


def test_a_run_that_ends_early_scores_its_finished_model_and_is_over(kit):
    """method.patience: the last round is not known before."""
    kit.policy(scores="coarse")
    host = kit.host(method={"name": "fedavg", "rounds": 9, "patience": 1}, evaluation={"statistics": True})
    weights = first_weights(host)
    ask(host, "train", 1, weights=weights)
    ask(host, "evaluate", 1, weights=weights)
    with pytest.raises(ParcelRejected, match="of the finished model, after its test scores"):
        ask(host, "give_statistics", 1, weights=weights)
    assert ask(host, "evaluate", 1, weights=weights, split="test").parcels
    assert ask(host, "give_statistics", 1, weights=weights).parcels
    with pytest.raises(GateRefused, match="the run was over before round 2"):
        ask(host, "train", 2, weights=weights)
