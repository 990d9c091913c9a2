"""Corrections of gradients, and steps of methods with personal models, by hand."""

from types import SimpleNamespace

import pytest
import torch
from stand_ins import Coordinator, site_with_state
from test_baselines import PLAIN, assert_close, bare_loop, of_sites

from polyclinic.federation.call import Reply
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods.fedprox import FedProx
from polyclinic.methods.moon import Moon
from polyclinic.methods.scaffold import Scaffold
from polyclinic.methods.shared import local_training


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch):
    monkeypatch.setattr(FedProx, "steps_at", lambda self, own: 2)


START = {"w": torch.tensor([1.0, 1.0])}
ONES = {"w": torch.ones(2)}


def corrected(plan, weights, gradients=ONES):
    """The gradients of one step at these weights, and the correction's state after it."""
    correction = plan.spec.correction
    return correction.change(gradients, {"w": torch.tensor(weights)}, correction.given, correction.state)


def test_corrections_pull_and_weigh_by_hand():
    plan = next(FedProx(mu=0.5).train(site_with_state("a"), START))
    assert plan.start == START
    assert corrected(plan, [1.0, 3.0])[0]["w"].tolist() == [1, 2]  # 1 + 0.5 (w - 1)
    elsewhere = next(FedProx(mu=0.5).train(site_with_state("a"), {"other": torch.zeros(2)}))
    assert corrected(elsewhere, [1.0, 3.0])[0]["w"].tolist() == [1, 1]  # a layer that stays at the site
    assert local_training.class_weights(torch.tensor([0, 0, 0, 2]), 3).tolist() == pytest.approx([4 / 6, 0, 2])
    assert local_training.class_weights(torch.tensor([1.0, 1.0]), 2).tolist() == [0, 1]


def own_model(result):
    """The model of the only site."""
    return {name.removeprefix("site-1/"): tensor for name, tensor in result.weights().items()}


@pytest.mark.parametrize("mu", [0.5, 1.0])
def test_the_contrast_is_small_near_the_common_model(mu):
    common, last = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    near, far = (float(torch.nn.functional.softplus(torch.tensor(x))) for x in (-2.0, 2.0))
    moon = Moon(mu=mu, temperature=0.5)
    assert float(moon._contrast(common, common, last)) == pytest.approx(mu * near)
    assert float(moon._contrast(last, common, last)) == pytest.approx(mu * far)


def test_the_control_moves_by_the_share_of_sites_that_replied():
    """Three of four sites reply, two of them as one sum; the controls of those that did change by 1 and 4."""

    def reply(site, weight, change, **more):
        parts = (Parcel("weights", {"w": torch.tensor([weight])}), Parcel("gradients", {"w": torch.tensor([change])}))
        return Reply(site, tuple(Parcel(one.kind, one.tensors, {"samples": 1, **more}) for one in parts))

    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(1))})
    federation = Coordinator(
        replies=[[reply("a", 3.0, 1.0, sites=2), reply("b", 5.0, 4.0)], [reply("a", 4.0, 0.0)]],
        initial_weights=lambda: {"w": torch.tensor([1.0])},
        trainer=SimpleNamespace(model=model),
    )
    federation.sites = ("a", "b", "c", "d")
    found = Scaffold(rounds=2, server_lr=0.5).run(federation)
    first, second = (given for _, given in federation.asked)
    assert first["gradients"]["w"].tolist() == [0]
    assert second["weights"]["w"].tolist() == [1 + 0.5 * (4 - 1)]
    assert second["gradients"]["w"].tolist() == [3 / 4 * 2.5]
    assert federation.kept.control["w"].tolist() == [3 / 4 * 2.5]
    assert found["w"].tolist() == [2.5 + 0.5 * (4 - 2.5)]


HEAD = [f"fc{layer}.{kind}" for layer in (1, 2, 3) for kind in ("weight", "bias")]  # LeNet-5 after its last cut
ALONE = {"sites": {"partition": "iid", "count": 1}, **PLAIN}


def values_of(model):
    return {name: one.detach().clone() for name, one in model.named_parameters()}


def test_the_own_model_of_ditto_by_hand(tiny_run):
    """w steps along g(w); v along g(v) + lambda (v - w), with the w that the round began with."""
    pull, result = 0.5, tiny_run({"name": "ditto", "strength": 0.5}, **ALONE)
    model, step = bare_loop(result)
    common = own = values_of(model)
    for number in (1, 2):
        held_to = common
        model.load_state_dict(common, strict=False)
        step(number, lambda: None)
        common = values_of(model)
        model.load_state_dict(own, strict=False)

        def pulled(held_to=held_to):
            for name, one in model.named_parameters():
                one.grad += pull * (one.detach() - held_to[name])

        step(number, pulled)
        own = values_of(model)
    assert_close(own, own_model(result))


def test_fine_tuning_and_fedrep_by_hand(tiny_run):
    """Two rounds of FedAvg, and as many further steps as a pass has, in an order of their own."""
    model, step = bare_loop(tiny_run({"name": "fedavg"}, **ALONE))
    for number in (1, 2):
        step(number, lambda: None)
    steps = step(2, lambda: None, "tuning batches")
    assert_close(values_of(model), own_model(tiny_run({"name": "finetune", "tuning_steps": steps}, **ALONE)))
    # One pass changes the head alone, the next one everything else.
    result = tiny_run({"name": "fedrep", "head_epochs": 1}, **ALONE)
    model, step = bare_loop(result)
    for number in (1, 2):
        step(number, lambda: leave_out(model, lambda name: name not in HEAD), "head batches")
        step(number, lambda: leave_out(model, lambda name: name in HEAD))
    assert_close(values_of(model), own_model(result))


def leave_out(model, chosen):
    for name, one in model.named_parameters():
        if chosen(name):
            one.grad.zero_()


def test_first_rounds_of_fedper_and_fedrep_are_fedavgs(tiny_run):
    ours = tiny_run({"name": "fedper", "rounds": 1}, **PLAIN)
    average = tiny_run({"name": "fedavg", "rounds": 1}, **PLAIN).weights()
    alone = tiny_run({"name": "standalone", "rounds": 1}, **PLAIN)
    for name, tensor in average.items():
        expected = of_sites(alone, name) if name in HEAD else [tensor] * 3
        assert all(torch.equal(*pair) for pair in zip(of_sites(ours, name), expected, strict=True))
    # The common layers have FedAvg's gradient as long as the head is where both began; it stays there.
    first = {"rounds": 1, "local_steps": 1}
    ours = tiny_run({"name": "fedrep", "head_epochs": 0, **first}, **PLAIN)
    for name, tensor in tiny_run({"name": "fedavg", **first}, **PLAIN).weights().items():
        if name not in HEAD:
            assert all(torch.equal(one, tensor) for one in of_sites(ours, name))
        else:
            assert len({one.numpy().tobytes() for one in of_sites(ours, name)} | {tensor.numpy().tobytes()}) == 2
