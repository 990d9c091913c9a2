"""A network's weights by name: those of `state_dict`, also after a tensor was put in another's place."""

from __future__ import annotations

import torch
from torch import nn

from polyclinic.training.network_state import NetworkState


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
