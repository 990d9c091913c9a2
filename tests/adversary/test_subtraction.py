"""Attack: two studies that differ by one step of training, whose releases are subtracted: one batch's gradient."""

import pytest
import torch
from attacked_site import ask, first_weights

from polyclinic.randomness import torch_rng

LR = 0.05
STUDY = {"optimizer__name": "sgd", "optimizer__momentum": 0.0, "optimizer__weight_decay": 0.0, "optimizer__lr": LR}


def trained(kit, run, weights, steps):
    host = kit.host(run, method={"name": "fedavg", "rounds": 3, "local_steps": steps}, **STUDY)
    return host, ask(host, "train", 1, weights=weights).parcels[0].tensors


def batch_gradient(host, weights, number):
    """The coordinator's guess: the gradient of the batch of this number, drawn from the study's seed."""
    trainer, part = host.spec.trainer, host.sites.get("north").data.train
    batches = trainer.batches(part, torch_rng(0, "north", "batches", 1))
    for _ in range(number):
        images, targets = next(batches)
    model = trainer.load(weights).train()
    model.zero_grad(set_to_none=True)
    trainer.loss(trainer.forward(images), targets).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("draws", ["study", "own"])
def test_two_studies_one_step_apart_give_no_batch_away(kit, draws):
    """With the study's draws, which a policy must name, the attack works."""
    kit.policy(draws=draws, min_cohort=10, shares="equal")
    weights = first_weights(kit.host("first"))
    host, two = trained(kit, "two", weights, 2)
    _, three = trained(kit, "three", weights, 3)
    found = torch.cat(
        [((two[name] - three[name]) / LR).flatten() for name, _ in host.spec.trainer.model.named_parameters()]
    )
    guess = batch_gradient(host, two, 3)
    alike = float(torch.nn.functional.cosine_similarity(found, guess, dim=0))
    assert (alike > 0.999) == (draws == "study")


def test_the_same_study_twice_gives_other_bits_and_the_same_ones_when_it_is_resumed(kit):
    weights = first_weights(kit.host("first"))
    _, first = trained(kit, "a", weights, 2)
    _, other = trained(kit, "b", weights, 2)
    host, _ = trained(kit, "c", weights, 2)
    again = kit.host("c", method={"name": "fedavg", "rounds": 3, "local_steps": 2}, **STUDY)
    assert again is not host
    assert any(not torch.equal(first[name], other[name]) for name in first)
    _, resumed = trained(kit, "a", weights, 2)
    assert all(torch.equal(first[name], resumed[name]) for name in first)
