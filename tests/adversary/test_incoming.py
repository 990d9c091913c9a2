"""Attack: crafted weights, of all sorts. The incoming check of a deployed site stops them before any work."""

import pytest
import torch
from attacked_site import SITE, Kit, ask

from polyclinic import attacks
from polyclinic.deployment.deployed_site import FAILED, discreet
from polyclinic.federation.leaving.parcel import Parcel, ParcelRejected
from polyclinic.federation.leaving.suspension import DataDependentRefusal, Suspended, Suspensions

PUBLIC = torch.rand(40, 1, 16, 16, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def checked(kit) -> Kit:
    """The kit of a site that inspects what arrives, as every site does unless its people switch that off."""
    kit.policy(incoming="on = true")
    return kit


def fedsgd(kit, backbone, run="run"):
    host = kit.host(run, model={"backbone": backbone}, method={"name": "fedsgd", "rounds": 3})
    weights = host.spec.first_weights(SITE)
    model = host.spec.trainer.model.cpu()
    model.load_state_dict(weights)
    return host, weights, model


CRAFTED = {
    "imprint": ("cnn-64-128-64-32", attacks.Imprint()),
    "imprint, few bins": ("cnn-64-128-64-32", attacks.Imprint(strength=0.1)),
    "imprint, tanh": ("lenet5", attacks.Imprint(measure="random")),
    "imprint, short rows": ("lenet5", attacks.Imprint(gain=0.01)),
    "trap weights": ("cnn-32-64-128", attacks.TrapWeights(alive=0.05)),
    "crafted sum": ("lenet5", attacks.CraftedSum()),
    "fishing": ("small-cnn", attacks.Fishing()),
    "fishing, convolutions open": ("lenet5", attacks.Fishing(open_convolutions=True)),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_an_attack_is_stopped_before_any_work(checked, name):
    backbone, attack = CRAFTED[name]
    host, _, model = fedsgd(checked, backbone)
    with pytest.raises((ParcelRejected, DataDependentRefusal), match="incoming check"):
        ask(host, "gradient", weights=attack.craft(model, PUBLIC).state_dict())
    assert not list(checked.folder.glob("runs/run/ledger/*.jsonl"))


def test_weights_that_overflow_are_refused_openly(checked):
    host, _, model = fedsgd(checked, "lenet5")
    crafted = attacks.OverflowFilter().craft(model, PUBLIC[0], PUBLIC[1:])
    with pytest.raises(ParcelRejected, match=r"largest of 'fc3\.weight'") as refused:
        ask(host, "gradient", weights=crafted.state_dict())
    assert discreet(str(checked.folder))(refused.value) == str(refused.value)
    assert Suspensions(checked.folder).all() == []


def test_what_has_looked_at_images_tells_one_sentence_and_suspends(checked):
    host, _, model = fedsgd(checked, "small-cnn")
    crafted = attacks.Fishing(strength=1000.0).craft_cut(model, PUBLIC, 0.5)
    with pytest.raises(DataDependentRefusal) as refused:
        ask(host, "gradient", weights=crafted.state_dict())
    assert discreet(str(checked.folder))(refused.value) == FAILED
    [waiting] = Suspensions(checked.folder).all()
    assert "incoming check" in waiting.reason
    with pytest.raises(Suspended):
        ask(host, "gradient", weights=host.spec.first_weights(SITE))


def test_another_network_than_the_seed_gives_is_not_the_first_one(checked):
    host, weights, _ = fedsgd(checked, "lenet5")
    drawn = {
        name: tensor[torch.randperm(len(tensor), generator=torch.Generator().manual_seed(1))]
        for name, tensor in weights.items()
    }
    with pytest.raises(DataDependentRefusal, match="moved of"):
        ask(host, "gradient", weights=drawn)


def test_the_course_is_remembered_by_a_new_process_of_the_site(checked):
    """Steps that are each allowed lead away; a new process compares with where they led, and not with the first."""
    host, weights, _ = fedsgd(checked, "lenet5")
    for number in (1, 2):
        weights = {name: tensor * 1.5 for name, tensor in weights.items()}
        ask(host, "gradient", number, weights=weights)
    positions = host.checkpoint()
    again, _, _ = fedsgd(checked, "lenet5")
    again.restore(positions)
    assert ask(again, "gradient", 3, weights={name: tensor * 1.01 for name, tensor in weights.items()}).parcels
    fresh, _, _ = fedsgd(checked, "lenet5", run="another")
    with pytest.raises(DataDependentRefusal, match="moved of"):
        ask(fresh, "gradient", 1, weights={name: tensor * 1.01 for name, tensor in weights.items()})


def test_a_gradient_for_one_image_of_a_batch_is_stopped(checked):
    """SplitNN: the coordinator chooses the gradient at the cut, and so whose image the front of the network learns."""
    checked.policy(incoming="on = true", kinds=["weights", "activations", "labels", "statistics", "metrics"])
    host = checked.host(method={"name": "splitnn", "rounds": 3})
    ask(host, "begin", weights=host.spec.first_weights(SITE))

    def step(gradient):
        shape = ask(host, "forward").parcels[0].tensors["activations"].shape
        return ask(
            host, "backward", parcels={"gradients": Parcel("gradients", {"activations": gradient.expand(shape)})}
        )

    step(torch.full((8, 1, 1, 1), 1e-3))
    single = torch.zeros(8, 1, 1, 1)
    single[3] = 1e-2
    with pytest.raises(DataDependentRefusal, match="dominance of 'activations'"):
        step(single)


def test_a_gradient_far_longer_than_before_is_stopped(checked):
    checked.policy(incoming="on = true", kinds=["weights", "activations", "labels", "statistics", "metrics"])
    host = checked.host(method={"name": "splitnn", "rounds": 3})
    ask(host, "begin", weights=host.spec.first_weights(SITE))
    for length in (1e-3, 1e-3):
        shape = ask(host, "forward").parcels[0].tensors["activations"].shape
        ask(host, "backward", parcels={"gradients": Parcel("gradients", {"activations": torch.full(shape, length)})})
    ask(host, "forward")
    with pytest.raises(DataDependentRefusal, match="longer of 'activations'"):
        ask(host, "backward", parcels={"gradients": Parcel("gradients", {"activations": torch.full(shape, 1.0)})})


def test_what_was_inspected_once_is_not_inspected_again(checked, monkeypatch):
    host, weights, _ = fedsgd(checked, "lenet5")
    ask(host, "gradient", 1, weights=weights)
    monkeypatch.setattr(type(host.inspection), "_inspect_weights", None)
    assert ask(host, "gradient", 2, weights=weights).parcels
