"""A network's weights by name: those of `state_dict`, also after a tensor was put in another's place."""

from __future__ import annotations

import torch
from torch import nn

from polyclinic.training.network_state import NetworkState, copy_all


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Sequential(nn.Linear(3, 4, bias=False)))


def same(state: NetworkState, made: nn.Module) -> bool:
    wanted = made.state_dict()
    found = state()
    return list(found) == list(wanted) and all(
        found[name].data_ptr() == wanted[name].data_ptr() and torch.equal(found[name], wanted[name]) for name in wanted
    )


def test_it_follows_changes_in_place() -> None:
    made = network()
    state = NetworkState(made)
    with torch.no_grad():
        made[0].weight.add_(1)
    made[1](torch.randn(4, 2, 3, 3))  # moves its running statistics
    assert same(state, made)
    assert state() is state()  # not found anew


def test_it_finds_tensors_that_took_the_place_of_others() -> None:
    made = network()
    state = NetworkState(made)
    made[2][0].weight = nn.Parameter(torch.ones(4, 3))
    assert same(state, made)
    made[0].weight.data = torch.full((2, 1, 3, 3), 7.0)
    assert same(state, made)
    made[1].running_mean = torch.full((2,), 5.0)
    assert same(state, made)


def test_it_brings_all_layers_back_to_training() -> None:
    made = network()
    state = NetworkState(made)
    assert state.train() is made
    made[2].eval()  # a part of it, while the whole is still in training mode
    assert made.training
    state.train()
    assert all(layer.training for layer in made.modules())
    made.eval()
    assert state.train().training
    assert made[1].training


def test_copies_of_all_sorts_of_layouts() -> None:
    last = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    values = [torch.randn(3), last, torch.tensor(5), torch.randn(2, 2).double()]
    targets = [torch.zeros(3), torch.zeros(2, 3, 4, 4), torch.tensor(0), torch.zeros(2, 2)]
    copy_all(targets, values)
    assert all(torch.equal(one, other.to(one.dtype)) for one, other in zip(targets, values, strict=True))


def test_it_notices_a_layer_that_took_the_place_of_another() -> None:
    made, changes = network(), []
    state = NetworkState(made, lambda: changes.append(1))
    state.train()
    made[2][0] = nn.Linear(3, 5)
    assert same(state, made)
    assert changes == [1]
    assert [one.shape for one in state.parameters()] == [one.shape for one in made.parameters()]
    made.add_module("more", nn.Linear(2, 2).eval())
    assert state.train().more.training
    assert same(state, made)
    assert changes == [1, 1]
