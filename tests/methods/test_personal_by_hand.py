"""Ditto, FedRep, FedPer and fine-tuning: steps by a bare loop, and what a first round equals."""

from __future__ import annotations

import torch
from test_baselines import PLAIN, bare_loop, of_sites

HEAD = [f"fc{layer}.{kind}" for layer in (1, 2, 3) for kind in ("weight", "bias")]  # LeNet-5 after its last cut
ALONE = {"sites": {"partition": "iid", "count": 1}, **PLAIN}


def values_of(model):
    return {name: one.detach().clone() for name, one in model.named_parameters()}


def assert_own_model_is(result, values):
    for name, tensor in values.items():
        [ours] = of_sites(result, name)
        torch.testing.assert_close(ours, tensor, rtol=1e-4, atol=1e-6)


def test_the_own_model_of_ditto_by_hand(tiny_run, tmp_path, cache):
    """w steps along g(w); v along g(v) + lambda (v - w), with the w that the round began with."""
    pull, result = 0.5, tiny_run({"name": "ditto", "strength": 0.5}, **ALONE)
    model, step = bare_loop(result, tmp_path, cache)
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
    assert_own_model_is(result, own)


def test_fine_tuning_by_hand(tiny_run, tmp_path, cache):
    """Two rounds of FedAvg, and as many further steps as a pass has, in an order of their own."""
    passes = tiny_run({"name": "fedavg"}, **ALONE)
    model, step = bare_loop(passes, tmp_path, cache)
    for number in (1, 2):
        step(number, lambda: None)
    steps = step(2, lambda: None, "tuning batches")
    assert_own_model_is(tiny_run({"name": "finetune", "tuning_steps": steps}, **ALONE), values_of(model))


def test_fedrep_by_hand(tiny_run, tmp_path, cache):
    """One pass changes the head alone, the next one everything else."""
    result = tiny_run({"name": "fedrep", "head_epochs": 1}, **ALONE)
    model, step = bare_loop(result, tmp_path, cache)
    for number in (1, 2):
        step(number, lambda: leave_out(model, lambda name: name not in HEAD), "head batches")
        step(number, lambda: leave_out(model, lambda name: name in HEAD))
    assert_own_model_is(result, values_of(model))


def leave_out(model, chosen):
    for name, one in model.named_parameters():
        if chosen(name):
            one.grad.zero_()


def test_a_first_round_of_fedper_has_fedavgs_common_layers_and_the_heads_of_standalone(tiny_run):
    ours = tiny_run({"name": "fedper", "rounds": 1}, **PLAIN)
    average = tiny_run({"name": "fedavg", "rounds": 1}, **PLAIN).weights()
    alone = tiny_run({"name": "standalone", "rounds": 1}, **PLAIN)
    for name, tensor in average.items():
        expected = of_sites(alone, name) if name in HEAD else [tensor] * 3
        assert all(torch.equal(*pair) for pair in zip(of_sites(ours, name), expected, strict=True))


def test_a_first_step_of_fedrep_without_passes_for_the_head_is_fedavgs(tiny_run):
    """The common layers have FedAvg's gradient as long as the head is where both began; it stays there."""
    first = {"rounds": 1, "local_steps": 1}
    ours = tiny_run({"name": "fedrep", "head_epochs": 0, **first}, **PLAIN)
    for name, tensor in tiny_run({"name": "fedavg", **first}, **PLAIN).weights().items():
        if name not in HEAD:
            assert all(torch.equal(one, tensor) for one in of_sites(ours, name))
        else:
            assert len({one.numpy().tobytes() for one in of_sites(ours, name)} | {tensor.numpy().tobytes()}) == 2
