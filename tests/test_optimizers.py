"""Optimisers that do not load the compiler: the steps are torch's own, to the last bit."""

import copy

import pytest
import torch
from torch import nn

from polyclinic import optimizers

KINDS = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.1},
    "Adam": {"weight_decay": 0.1},
    "AdamW": {"weight_decay": 0.1},
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[torch.Tensor]:
    images = torch.linspace(-1, 1, 24).reshape(6, 4)
    for _ in range(steps):
        optimizer.zero_grad()
        model(images).square().sum().backward()
        optimizer.step()
    return [one.detach().clone() for one in model.parameters()]


def both(name: str, lr: float = 0.05):
    """The same network twice: with an optimiser of ours, and with torch's."""
    model = network()
    theirs = copy.deepcopy(model)
    return (
        (model, getattr(optimizers, name)(model.parameters(), lr, **KINDS[name])),
        (theirs, getattr(torch.optim, name)(theirs.parameters(), lr, **KINDS[name])),
    )


@pytest.mark.parametrize("name", KINDS)
def test_steps_are_those_of_torch(name):
    ours, theirs = both(name)
    for one, other in zip(train(*ours), train(*theirs), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", KINDS)
def test_states_can_be_exchanged_with_torch(name):
    ours, theirs = both(name)
    again = both(name)[0]
    train(*ours)
    for (model, optimizer), (before, state) in ((theirs, ours), (again, theirs)):
        model.load_state_dict(before.state_dict())
        optimizer.load_state_dict(copy.deepcopy(state.state_dict()))  # torch would let them share their moments
    for one, other in zip(train(*again), train(*theirs), strict=True):
        assert torch.equal(one, other)


def test_a_step_leaves_no_graph_and_calls_hooks():
    model, optimizer = both("SGD")[0]
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(torch.is_grad_enabled()))
    train(model, optimizer, steps=2)
    assert len(steps) == 2
    assert isinstance(optimizer, torch.optim.SGD)
    assert all(one.grad_fn is None for one in model.parameters())
    assert torch.is_grad_enabled()


def test_a_compiled_network_learns_the_same():
    (model, optimizer), (theirs, plain) = both("Adam")
    compiled = torch.compile(model, backend="eager")
    for one, other in zip(train(compiled, optimizer), train(theirs, plain), strict=True):
        assert torch.equal(one, other)
