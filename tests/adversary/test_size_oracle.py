"""Attack: a byte budget that is spent, and weights whose training loss has more digits if a patient is a member."""

import pytest
import torch
from attacked_site import ask, first_weights

from polyclinic.deployment.deployed_site import FAILED, discreet
from polyclinic.federation.call import GateRefused
from polyclinic.federation.layers.suspension import Suspensions

ONE_STEP = {"method": {"name": "fedavg", "rounds": 3, "local_steps": 1}, "optimizer__lr": 1e-30}


def chosen_weights(host, bias):
    """Every image gets the same answer, so that the loss is a number of the coordinator's choice."""
    weights = first_weights(host)
    weights["fc3.weight"].zero_()
    weights["fc3.bias"].copy_(torch.tensor([bias, -bias]))
    return weights


def refusals(kit, host):
    for bias in (0.0, 64.0, 100.1):
        with pytest.raises(GateRefused) as refused:
            ask(host, "train", weights=chosen_weights(host, bias))
        yield discreet(str(kit.folder))(refused.value)


def test_a_byte_budget_that_is_spent_is_told_before_an_image_is_looked_at(kit, monkeypatch):
    kit.policy(max_bytes=0)
    host = kit.host(**ONE_STEP)
    monkeypatch.setattr(type(host.spec.trainer), "batch", lambda *a: pytest.fail("the site worked nevertheless"))
    [told] = set(refusals(kit, host))
    assert "more bytes would have left this site than the 0 that its policy allows" in told
    assert Suspensions(kit.folder).all() == []


def test_a_refusal_after_the_work_does_not_tell_the_size(kit):
    """The budget has room for the model's numbers, but not for the header beside them."""
    host = kit.host(**ONE_STEP)
    numbers = sum(tensor.numel() * tensor.element_size() for tensor in first_weights(host).values())
    kit.policy(max_bytes=numbers)
    [told] = set(refusals(kit, kit.host("next", **ONE_STEP)))
    assert f"than the {numbers} that its policy allows" in told
    assert Suspensions(kit.folder).all() == []


def test_a_size_that_depends_on_images_is_refused_like_any_other_failure(kit):
    """How well synthetic images compress depends on what their generator has learnt."""
    kit.policy(max_bytes=100)
    tiny = {"name": "dcgan", "steps": 1, "width": 2, "latent": 4}
    method = {"name": "centralized", "images": "synthetic", "rounds": 1}
    host = kit.host(method=method, generator=tiny, data__size=32, tuning={"on": False})
    with pytest.raises(GateRefused, match="more bytes") as refused:
        ask(host, "give_synthetic", 0)
    assert discreet(str(kit.folder))(refused.value) == FAILED
    assert len(Suspensions(kit.folder).all()) == 1


def test_a_run_that_was_put_back_may_repeat_what_has_left_and_cannot_ask_by_it(kit):
    host = kit.host(**ONE_STEP)
    sent = chosen_weights(host, 0.0)
    [parcel] = ask(host, "train", weights=sent).parcels
    kit.policy(max_bytes=len(parcel.encoded))
    host = kit.host(**ONE_STEP)
    assert ask(host, "train", weights=sent).parcels[0].digest == parcel.digest
    host = kit.host(**ONE_STEP)
    with pytest.raises(GateRefused, match="more bytes") as refused:  # "is it the same?" would be a question as well
        ask(host, "train", weights=chosen_weights(host, 1.0))
    assert discreet(str(kit.folder))(refused.value) == FAILED


@pytest.mark.parametrize("name", ["fedavg", "fedprox"])
def test_the_training_loss_stays(kit, name):
    """It is an exact score of training images, which `max_scores` would not count."""
    kit.policy(kinds=["weights"], max_scores=0)
    host = kit.host(method={"name": name, "rounds": 3})
    [parcel] = ask(host, "train", weights=first_weights(host)).parcels
    assert set(parcel.metadata) == {"samples", "steps"}
