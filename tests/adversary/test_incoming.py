"""Attack: crafted weights, of all sorts. The incoming check of a deployed site stops them before any work."""

import pytest
import torch
from attacked_site import SITE, ask, shuffled

from polyclinic import attacks
from polyclinic.deployment.deployed_site import FAILED, discreet
from polyclinic.federation.call import DataDependentRefusal, Suspended
from polyclinic.federation.layers import incoming_figures as course
from polyclinic.federation.layers.suspension import Suspensions
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.policy import Incoming

PUBLIC = torch.rand(40, 1, 16, 16, generator=torch.Generator().manual_seed(5))


def fedsgd(kit, backbone, run="run", lr=0.05):
    optimizer = {"batch_size": 8, "lr": lr}
    host = kit.host(run, model={"backbone": backbone}, method={"name": "fedsgd", "rounds": 3}, optimizer=optimizer)
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
    with pytest.raises(DataDependentRefusal, match="moved of"):
        ask(host, "gradient", weights=shuffled(weights))


def test_the_course_is_remembered_by_a_new_process_of_the_site(checked):
    """Steps that are each allowed lead away; a new process compares with where they led, and not with the first."""
    host, weights, _ = fedsgd(checked, "lenet5", lr=1e-5)
    for number in (1, 2):
        weights = {name: tensor * 1.1 for name, tensor in weights.items()}
        ask(host, "gradient", number, weights=weights)
    positions, weights = host.checkpoint(), {name: tensor * 1.1 for name, tensor in weights.items()}
    again, _, _ = fedsgd(checked, "lenet5", lr=1e-5)
    again.restore(positions)
    assert ask(again, "gradient", 3, weights=weights).parcels
    fresh, _, _ = fedsgd(checked, "lenet5", run="another", lr=1e-5)
    with pytest.raises(DataDependentRefusal, match="moved of"):
        ask(fresh, "gradient", 1, weights=weights)


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


@pytest.mark.parametrize("lr", [1.0, 1e2, 1e4, 1e8])
def test_a_learning_rate_does_not_make_room_for_other_weights(checked, lr):
    """Whatever a step of the site would be at such a rate: one step counts as no longer than LONGEST_STEP. The site's
    people allow any rate here, which a site by itself refuses."""
    checked.policy(incoming="on = true\nsgd_rate = 1e9")
    host = checked.host(optimizer={"lr": lr, "momentum": 0.0, "batch_size": 8}, method={"name": "fedsgd", "rounds": 3})
    weights = host.spec.first_weights(SITE)
    ask(host, "gradient", 1, weights=weights)
    found = course.movement(shuffled(weights), weights)
    room = Incoming().times_own * course.LONGEST_STEP
    assert min(value for layer, value in found.items() if layer.startswith(("conv", "fc1", "fc2"))) > 1.2 * room
    with pytest.raises(DataDependentRefusal, match="moved of"):
        ask(host, "gradient", 2, weights=shuffled(weights))


def test_a_rate_that_falls_does_not_leave_the_room_of_the_first_rounds(checked):
    """A study with a large rate at first, and next to none later: what training moves falls with the rate."""
    checked.policy(incoming="on = true\nsgd_rate = 0.2")
    optimizer = {"lr": 0.2, "momentum": 0.0, "batch_size": 8, "decay_every": 1, "decay": 1e-6}
    host = checked.host(optimizer=optimizer, method={"name": "fedavg", "rounds": 4})
    weights = host.spec.first_weights(SITE)
    for number in (1, 2):
        weights = dict(ask(host, "train", number, weights=weights).parcels[0].tensors)
    ask(host, "train", 3, weights=weights)
    with pytest.raises(DataDependentRefusal, match="moved of"):
        ask(host, "train", 4, weights={name: tensor * 1.3 for name, tensor in weights.items()})


def test_a_control_variate_does_not_carry_another_network(checked):
    """SCAFFOLD: honest weights, and a control variate that turns them into others in the first local step."""
    host = checked.host(method={"name": "scaffold", "rounds": 3, "local_steps": 2})
    weights = host.spec.first_weights(SITE)
    rate = 2 * 0.05
    other = shuffled(weights)
    learned = dict(host.spec.trainer.model.named_parameters())
    control = {name: (weights[name] - other[name]) / rate for name in learned}
    with pytest.raises(DataDependentRefusal, match=r"moved of .* by the control variate"):
        ask(host, "train", 1, weights=weights, parcels={"gradients": Parcel("gradients", control)})


def test_an_honest_control_variate_passes(checked):
    host = checked.host(method={"name": "scaffold", "rounds": 3})
    weights = host.spec.first_weights(SITE)
    control = {name: torch.zeros_like(one) for name, one in host.spec.trainer.model.named_parameters()}
    for number in (1, 2, 3):
        parcels = {"gradients": Parcel("gradients", control)}
        trained, change = ask(host, "train", number, weights=weights, parcels=parcels).parcels
        weights, control = dict(trained.tensors), {n: control[n] + one for n, one in change.tensors.items()}


def test_the_first_gradient_at_the_cut_is_not_about_one_image(checked):
    checked.policy(incoming="on = true", kinds=["weights", "activations", "labels", "statistics", "metrics"])
    host = checked.host(method={"name": "splitnn", "rounds": 3})
    ask(host, "begin", weights=host.spec.first_weights(SITE))
    shape = ask(host, "forward").parcels[0].tensors["activations"].shape
    single = torch.zeros(shape)
    single[3] = 1e-2
    with pytest.raises(DataDependentRefusal, match="dominance of 'activations'"):
        ask(host, "backward", parcels={"gradients": Parcel("gradients", {"activations": single})})


def trained_elsewhere(kit, **optimizer):
    """What another site of a cycle has made of the first weights, and the site that gets it."""
    settings = {"optimizer": {"batch_size": 8, **optimizer}, "method": {"name": "cwt", "rounds": 3}}
    other = kit.host("another", **settings)
    first = other.spec.first_weights(SITE)
    weights = dict(ask(other, "train", 1, weights=first).parcels[0].tensors)
    return kit.host("cycle", **settings), weights, max(course.movement(weights, first).values())


def test_a_later_site_of_a_cycle_takes_what_others_trained(checked):
    """It has moved farther than a site allows that knows nothing about training: so the site trains by itself first."""
    host, weights, moved = trained_elsewhere(checked, name="adam", lr=0.005)
    assert moved > 1.1 * Incoming().moved
    assert ask(host, "train", 1, weights=weights).parcels


def test_a_later_site_of_a_cycle_takes_no_other_network(checked):
    host, weights, _ = trained_elsewhere(checked, lr=0.001)
    with pytest.raises(DataDependentRefusal, match="moved of"):
        ask(host, "train", 1, weights=shuffled(weights))


def test_a_study_whose_steps_are_too_long_is_refused_openly_before_any_work(checked):
    """Adam moves every number by about its rate: a rate that makes room for any weights is seen without any image."""
    host = checked.host(optimizer={"name": "adam", "lr": 0.05, "batch_size": 8})
    with pytest.raises(
        ParcelRejected, match=r"step of .* is .*, and 0\.2 is the limit; choose a smaller optimizer\.lr"
    ):
        ask(host, "train", weights=host.spec.first_weights(SITE))
    assert Suspensions(checked.folder).all() == []
    usual = checked.host("usual", optimizer={"name": "adam", "lr": 0.001, "batch_size": 8})
    assert ask(usual, "train", weights=usual.spec.first_weights(SITE)).parcels


@pytest.mark.parametrize("method", ["fedavg", "fedsgd"])
def test_a_rate_of_sgd_that_is_too_large_is_refused_openly_before_any_work(checked, method):
    operation = "train" if method == "fedavg" else "gradient"
    host = checked.host(optimizer={"lr": 0.2, "batch_size": 8}, method={"name": method, "rounds": 3})
    with pytest.raises(ParcelRejected, match=r"sgd_rate of 'the study' is 0\.2, and 0\.1 is the limit; choose"):
        ask(host, operation, weights=host.spec.first_weights(SITE))
    assert Suspensions(checked.folder).all() == []


def test_a_warm_up_does_not_hide_the_rate_that_it_leads_to(checked):
    host = checked.host(optimizer={"name": "adam", "lr": 0.05, "warmup": 2, "batch_size": 8})
    with pytest.raises(ParcelRejected, match="step of"):
        ask(host, "train", weights=host.spec.first_weights(SITE))
