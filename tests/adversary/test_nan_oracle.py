"""Attack: weights with which one image's gradient overflows, so that "holds NaN" means "this patient is yours"."""

import math

import pytest
import torch
from attacked_site import PRIVATE, ask, first_weights

from polyclinic.deployment.deployed_site import FAILED, discreet
from polyclinic.federation.call import GateRefused, Suspended
from polyclinic.federation.layers.suspension import Suspensions
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods.private_head import clipped_sum, features_of


@pytest.mark.parametrize("method", [{"name": "fedsgd", "rounds": 3}, {"name": "fedavg", "rounds": 3}])
def test_a_private_gradient_that_overflows_counts_as_none(kit, method):
    """The site answers as always; what leaves holds noise, and no number that is not finite."""
    host = kit.host(method=method, privacy=PRIVATE)
    weights = first_weights(host)
    weights["fc2.weight"].fill_(3e38)
    weights["fc3.weight"].fill_(3e38)
    operation = "gradient" if method["name"] == "fedsgd" else "train"
    reply = ask(host, operation, weights=weights)
    [released] = [parcel for parcel in reply.parcels if parcel.kind in ("gradients", "weights")]
    assert all(bool(tensor.isfinite().all()) for tensor in released.tensors.values())


def test_one_image_that_overflows_leaves_the_others_gradients_as_they_are(kit, monkeypatch):
    """By hand: the mean of the other images' clipped gradients, over all images; noise is next to nothing."""
    clip, lost = 0.5, 7
    host = kit.host(
        method={"name": "fedsgd", "rounds": 3},
        privacy={"on": ["classifier"], "noise_multiplier": 1e-9, "max_grad_norm": clip},
    )
    trainer, train, weights = host.spec.trainer, host.sites.get("north").data.train, first_weights(host)
    weights["fc3.bias"].copy_(torch.tensor([2.0, -2.0]))  # so that the gradients of the two classes do not cancel
    batch_of, model = type(trainer).batch, trainer.load(weights)
    expected = {name: torch.zeros_like(weight) for name, weight in model.named_parameters()}
    for place in set(range(len(train))) - {lost}:
        images, targets = trainer.batch(train, torch.tensor([place]), torch.Generator())
        gradients = torch.autograd.grad(trainer.loss(model(images), targets), list(model.parameters()))
        norm = torch.sqrt(sum(gradient.square().sum() for gradient in gradients))
        for total, gradient in zip(expected.values(), gradients, strict=True):
            total += gradient * min(1.0, clip / float(norm)) / len(train)

    def overflowing(self, part, index, draws):
        images, targets = batch_of(self, part, index, draws)
        return torch.where((index == lost)[:, None, None, None], torch.inf, images), targets

    monkeypatch.setattr(type(trainer), "batch", overflowing)
    released = ask(host, "gradient", weights=weights).parcels[0].tensors
    assert max(float(total.abs().max()) for total in expected.values()) > 1e-2
    for name, total in expected.items():
        torch.testing.assert_close(released[name], total, atol=1e-6, rtol=1e-2)


def test_a_refusal_for_nan_tells_one_sentence_and_suspends_every_study_of_the_site(kit, monkeypatch):
    # the same draws in every run: with some orders of the images every unit dies in the first step, and nothing is NaN
    monkeypatch.setattr("polyclinic.federation.host.secrets.token_hex", lambda count: "5e" * count)
    host, tell = kit.host(optimizer__lr=3e38), discreet(str(kit.folder))
    with pytest.raises(GateRefused, match="NaN") as refused:
        ask(host, "train", weights=first_weights(host))
    assert tell(refused.value) == FAILED
    for run in ("run", "another"):  # one bit, and then nothing until a person has looked
        with pytest.raises(Suspended) as suspended:
            ask(kit.host(run, optimizer__lr=3e38), "train", weights=first_weights(host))
        assert tell(suspended.value) == FAILED
    [waiting] = Suspensions(kit.folder).all()
    assert waiting.study == "run"
    assert "NaN" in waiting.reason
    assert "NaN" in kit.log()

    assert Suspensions(kit.folder).release("run")
    assert not Suspensions(kit.folder).release("run")
    healthy = kit.host("next")
    assert ask(healthy, "train", weights=first_weights(healthy)).parcels


def test_any_exception_in_the_work_is_an_answer_about_images_too(kit, monkeypatch):
    host = kit.host()

    def fail(*arguments, **keywords):
        raise ValueError("image 17 is too bright")

    monkeypatch.setattr(type(host.spec.trainer), "train", fail)
    with pytest.raises(ValueError, match="too bright"):
        ask(host, "train", weights=first_weights(host))
    assert "image 17" in Suspensions(kit.folder).all()[0].reason


@pytest.mark.parametrize("policy", [{"kinds": ["metrics"]}, {"min_cohort": 1000}, {"max_bytes": 10}])
def test_what_the_policy_refuses_is_told_and_suspends_nothing(kit, policy):
    kit.policy(**policy)
    host = kit.host()
    with pytest.raises(GateRefused) as refused:
        ask(host, "train", weights=first_weights(host))
    assert discreet(str(kit.folder))(refused.value) == str(refused.value)
    assert Suspensions(kit.folder).all() == []


def test_a_full_machine_suspends_nothing(kit, monkeypatch):
    host = kit.host()

    def fail(*arguments, **keywords):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(type(host.spec.trainer), "train", fail)
    with pytest.raises(torch.OutOfMemoryError):
        ask(host, "train", weights=first_weights(host))
    assert Suspensions(kit.folder).all() == []


@pytest.mark.parametrize("unit", [None, torch.arange(3)], ids=["image", "patient"])
@pytest.mark.parametrize("far", [math.inf, math.nan, 3e38])
def test_an_image_that_a_basis_sends_to_infinity_counts_as_one_without_a_gradient(unit, far):
    slopes = torch.tensor([[0.5], [1.0], [0.0]])
    vectors = torch.tensor([[0.6, 0.8], [far, far], [far, 1.0]])
    assert clipped_sum(slopes, vectors, 1.0, unit).flatten().tolist() == pytest.approx([0.3, 0.4])


def test_a_basis_that_sends_one_image_to_infinity_tells_nothing(kit, monkeypatch):
    """The image farthest out lies beyond what float32 holds; the site answers as if it were not there. That the site
    compares the basis is left out here."""
    monkeypatch.setattr("polyclinic.methods.private_head.is_same_basis", lambda *bases: True)
    method = {"name": "private-head", "rounds": 1, "numbers": 4, "phantoms": 10}
    encoder = {"backbone": "efficientnet-lite0-1024", "input_size": 32}
    host = kit.host(model=encoder, method=method, privacy={"noise_multiplier": 1.0, "max_grad_norm": 1.0})
    site = host.sites.get("north")
    features = features_of(site, site.data.train)
    mean = features.mean(0)
    direction = features[0] - mean
    matrix = torch.zeros(len(mean), 4)
    matrix[:, 0] = direction * (3.5e38 / float(((features - mean) @ direction).abs().max()))
    assert int(((features - mean) @ matrix).isfinite().all(1).sum()) == len(features) - 1
    basis = {"matrix": matrix, "mean": mean, "sites": torch.tensor(2)}
    ask(host, "take_basis", 0, parcels={"statistics": Parcel("statistics", basis)})
    head = Parcel("statistics", {"head": torch.zeros(2, 5)})
    assert ask(host, "give_gradient", 1, parcels={"statistics": head}).parcels[0].privacy
    assert Suspensions(kit.folder).all() == []


def test_a_basis_that_is_not_finite_is_refused(kit):
    method = {"name": "private-head", "rounds": 1, "numbers": 4, "phantoms": 10}
    encoder = {"backbone": "efficientnet-lite0-1024", "input_size": 32}
    host = kit.host(model=encoder, method=method, privacy={"noise_multiplier": 1.0, "max_grad_norm": 1.0})
    with pytest.raises(ParcelRejected, match="the basis that came is not finite"):
        ask(host, "take_basis", 0, parcels={"statistics": Parcel("statistics", {"matrix": torch.tensor([math.inf])})})
    assert Suspensions(kit.folder).all() == []


def test_a_basis_of_the_coordinators_choice_is_refused(kit):
    """A basis that shows one feature alone, or the right one with one direction stretched."""
    method = {"name": "private-head", "rounds": 1, "numbers": 4, "phantoms": 10}
    encoder = {"backbone": "efficientnet-lite0-1024", "input_size": 32}
    host = kit.host(model=encoder, method=method, privacy={"noise_multiplier": 1.0, "max_grad_norm": 1.0})
    right = host.spec.method._basis(host.sites.get("north"))
    stretched = {**right, "matrix": right["matrix"] * torch.tensor([100.0, 1, 1, 1])}
    single = {**right, "matrix": torch.eye(*right["matrix"].shape)}
    for chosen in (stretched, single, {**right, "mean": right["mean"] + right["mean"].abs().max()}):
        with pytest.raises(ParcelRejected, match="not the one of the study's public phantoms"):
            ask(
                host,
                "take_basis",
                0,
                parcels={"statistics": Parcel("statistics", {**chosen, "sites": torch.tensor(2)})},
            )
    rotated = {**right, "matrix": right["matrix"] @ torch.linalg.qr(torch.eye(4) + 0.5).Q}
    for honest in (right, rotated):
        ask(host, "take_basis", 0, parcels={"statistics": Parcel("statistics", {**honest, "sites": torch.tensor(2)})})
