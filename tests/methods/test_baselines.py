"""SCAFFOLD, FedOpt, MOON, FedDyn, Ditto, FedRep, FedPer and fine-tuning: arithmetic by hand, and what they equal."""

import math
from types import SimpleNamespace

import pytest
import torch
from run_folders import kinds_of, lines_of
from safetensors.torch import load_file
from stand_ins import rebuild, reply
from test_equivalences import assert_not_same, assert_same

from polyclinic.errors import BadInput
from polyclinic.federation.federation import State
from polyclinic.methods import METHODS
from polyclinic.randomness import torch_rng

PLAIN = {"optimizer": {"momentum": 0.0, "augment": [], "batch_size": 8, "lr": 0.05}, "model": {"backbone": "lenet5"}}
PERSONAL = ("ditto", "fedrep", "fedper", "finetune")
NEW = ("scaffold", "fedopt", "moon", "feddyn", *PERSONAL)


def coordinator(sites: int = 2) -> SimpleNamespace:
    """What `combine` looks at: a network with the parameter `weight`, and the sites."""
    network = torch.nn.BatchNorm1d(1)
    return SimpleNamespace(trainer=SimpleNamespace(model=network, state=network.state_dict), sites=tuple("ab"[:sites]))


def two_rounds(method, changes=(1.0, -0.5)):
    """The weight after each round; it begins at 0, and the mean of the sites is `change` further."""
    state = State(weights={"weight": torch.tensor([0.0]), "running_var": torch.tensor([1.0])})
    found = []
    for change in changes:
        sent = [reply("a", 1, weight=[float(state.weights["weight"]) + change], running_var=[0.25])]
        state.weights = method.combine(coordinator(), state, sent)
        found.append(float(state.weights["weight"]))
    assert float(state.weights["running_var"]) == 0.25  # statistics are averaged
    return found


@pytest.mark.parametrize("name", ["adam", "yogi", "adagrad"])
def test_fedopt_by_hand(name):
    method = METHODS["fedopt"](server_optimizer=name, server_lr=0.1, beta1=0.5, beta2=0.75, tau=0.01)
    x, m, v, by_hand = 0.0, 0.0, 0.0001, []
    for d in (1.0, -0.5):
        m = 0.5 * m + 0.5 * d
        if name == "adam":
            v = 0.75 * v + 0.25 * d * d
        elif name == "yogi":
            v = v - 0.25 * d * d * math.copysign(1, v - d * d)
        else:
            v = v + d * d
        x += 0.1 * m / (math.sqrt(v) + 0.01)
        by_hand.append(x)
    assert two_rounds(method) == pytest.approx(by_hand, rel=1e-5)


def test_feddyn_and_momentum_by_hand():
    """(1 - beta) d instead of d: with lr / (1 - beta) the steps are those of FedAvgM."""
    ours = two_rounds(METHODS["fedopt"](server_optimizer="sgd", server_lr=2.0, beta1=0.5))
    assert ours == pytest.approx(two_rounds(METHODS["fedavgm"](beta=0.5, server_lr=1.0)))
    # h = -alpha / K * sum of changes; w = mean - h / alpha. Two sites move by 1 and 3, one of them in round 2.
    method, state = METHODS["feddyn"](alpha=0.5), State(weights={"weight": torch.tensor([0.0])})
    state.weights = method.combine(coordinator(), state, [reply("a", 1, weight=[1.0]), reply("b", 9, weight=[3.0])])
    assert float(state.h["weight"]) == -0.5 / 2 * (1 + 3)
    assert float(state.weights["weight"]) == 2.0 + 2.0
    state.weights = method.combine(coordinator(), state, [reply("a", 1, weight=[5.0])])
    assert float(state.h["weight"]) == -1.0 - 0.5 / 2 * (5 - 4)
    assert float(state.weights["weight"]) == 5.0 + 2.5


def test_a_site_of_feddyn_by_hand(tiny_run):
    """One site, plain SGD, two rounds: the bare loop with the two terms written out."""
    alone = {"sites": {"partition": "iid", "count": 1}, **PLAIN}
    alpha, result = 0.2, tiny_run({"name": "feddyn", "alpha": 0.2}, **alone)
    model, step = bare_loop(result)
    names = [name for name, _ in model.named_parameters()]
    linear = {name: torch.zeros(()) for name in names}
    h = {name: torch.zeros(()) for name in names}
    for number in (1, 2):
        start = {name: one.detach().clone() for name, one in model.named_parameters()}

        def correct(start=start):
            for name, one in model.named_parameters():
                one.grad += alpha * (one.detach() - start[name]) - linear[name]

        step(number, correct)
        with torch.no_grad():
            for name, one in model.named_parameters():
                moved = one - start[name]
                linear[name] = linear[name] - alpha * moved
                h[name] = h[name] - alpha * moved
                one.copy_(one - h[name] / alpha)
    assert_close(result.weights(), model.state_dict())


def bare_loop(result):
    """The network of a run's only site, and a function that takes a round's plain steps with it."""
    run = rebuild(result)
    model = run.trainer.load(run.assembly.initial_weights()).train()
    part = run.sites["site-1"].train

    def step(number, correct, purpose="batches"):
        batches = run.trainer.batches(part, torch_rng(run.study.seed, "site-1", purpose, number))
        steps = len(part) // run.study.optimizer.batch_size
        for _ in range(steps):
            images, labels = next(batches)
            model.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            correct()
            with torch.no_grad():
                for one in model.parameters():
                    one -= run.study.optimizer.lr * one.grad
        return steps

    return model, step


def assert_close(found, wanted):
    """Each tensor of the first is that of the second, but for rounding."""
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_begins_as_fedavg_of_equal_weights(tiny_run, option):
    """All controls are zero in the first round."""
    average = tiny_run({"name": "fedavg", "weighting": "uniform", "rounds": 1}, **PLAIN)
    assert_same(tiny_run({"name": "scaffold", "option": option, "rounds": 1}, **PLAIN), average)
    more = tiny_run({"name": "fedavg", "weighting": "uniform"}, **PLAIN)
    assert_not_same(tiny_run({"name": "scaffold", "option": option}, **PLAIN), more)


def test_scaffold_of_plain_steps_is_the_papers_formula(tiny_run):
    """Each step is along g_k - c_k + c, and the mean of c_k is c: what remains of the mean is that of the gradients."""
    full = {**PLAIN, "optimizer": {**PLAIN["optimizer"], "batch_size": 1000}}
    ours = tiny_run({"name": "scaffold", "rounds": 3, "local_steps": 1}, **full).weights()
    assert_close(ours, tiny_run({"name": "fedsgd", "rounds": 3, "weighting": "uniform"}, **full).weights())
    # One site, one round: its control is c_k - c + (x - y) / (K lr), with x before and y after K = 3 steps.
    alone = {"sites": {"partition": "iid", "count": 1}, **PLAIN}
    result = tiny_run({"name": "scaffold", "rounds": 1, "local_steps": 3}, **alone)
    [state] = (result.folder / "sites" / "site-1").glob("state-*.safetensors")
    kept, last = load_file(state), result.weights()
    for name, first in bare_loop(result)[0].named_parameters():
        by_formula = (first.detach() - last[name]) / (3 * 0.05)
        torch.testing.assert_close(kept[f"control/{name}"], by_formula, rtol=1e-2, atol=1e-4)


def test_ditto_and_fine_tuning_without_their_term_are_plain(tiny_run):
    """Both similarities are alike, and their difference has no gradient; what is left is rounding."""
    group = {"model": {"norm": "group"}}
    ours = tiny_run({"name": "moon", "mu": 5.0, "rounds": 1}, **group).weights()
    assert_close(ours, tiny_run({"name": "fedavg", "rounds": 1}, **group).weights())

    def left(result):
        return [line["digest"] for line in lines_of(result, "site-2") if line["kind"] == "weights"]

    ours, alone = tiny_run({"name": "ditto", "strength": 0.0}), tiny_run({"name": "standalone"}).weights()
    assert ours.weights().keys() == alone.keys()
    assert all(torch.equal(tensor, alone[name]) for name, tensor in ours.weights().items())
    common, held = tiny_run({"name": "fedavg"}), tiny_run({"name": "ditto", "strength": 1.0})
    assert left(ours) == left(common) == left(held)  # what left is what leaves in FedAvg
    assert held["weights_sha256"] != ours["weights_sha256"]
    selected = {"evaluation": {"every": 1, "select": "best"}}
    common = tiny_run({"name": "fedavg", "rounds": 3}, **selected).weights()
    ours = tiny_run({"name": "finetune", "tuning_steps": 0, "rounds": 3}, **selected)
    for name, tensor in common.items():
        assert all(torch.equal(one, tensor) for one in of_sites(ours, name))
        assert len(of_sites(ours, name)) == 3
    tuned = tiny_run({"name": "finetune", "tuning_steps": 2, "rounds": 3}, **selected)
    assert not torch.equal(*of_sites(tuned, "fc.bias")[:2])
    assert {kind for kinds in kinds_of(tuned).values() for kind in kinds} == {"weights", "metrics"}
    last = tiny_run({"name": "fedper"})["communication"]["total_bytes"]
    early = tiny_run({"name": "fedper", "personal_after": "conv1"})["communication"]["total_bytes"]
    assert early < last
    with pytest.raises(BadInput, match=r"method\.personal_after: small-cnn has no cut 'nose'; choose one of conv1"):
        tiny_run({"name": "fedper", "personal_after": "nose"})


def of_sites(result, name):
    return [tensor for key, tensor in result.weights().items() if key.endswith(f"/{name}")]


@pytest.mark.parametrize("method", [name for name in NEW if name != "moon"])
def test_they_go_with_differential_privacy(tiny_run, method):
    private = {"model": {"backbone": "small-cnn", "norm": "group"}, "privacy": {"noise_multiplier": 1.0}}
    quick = {"head_epochs": 1} if method == "fedrep" else {"tuning_steps": 1} if method == "finetune" else {}
    result = tiny_run({"name": method, "rounds": 1, "local_steps": 1, **quick}, **private)
    assert result["privacy"]["epsilon"] > 0
    assert "weights" not in result["privacy"]["does_not_cover"]


def test_what_has_no_private_form_is_refused_with_the_cure(tiny_run):
    private = {"model": {"backbone": "small-cnn", "norm": "group"}, "privacy": {"noise_multiplier": 1.0}}
    with pytest.raises(BadInput, match=r"'moon' adds a loss of three networks.*choose fedprox"):
        tiny_run({"name": "moon"}, **private)
    with pytest.raises(BadInput, match=r"method\.option: 'I' needs a gradient.*set method\.option = 'II'"):
        tiny_run({"name": "scaffold", "option": "I"}, **private)
