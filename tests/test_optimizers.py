"""Optimisers that do not load the compiler: the steps are torch's own, to the last bit."""

import copy

import pytest
import torch
from torch import nn

from polyclinic import optimizers
from polyclinic.training.optimizer import Optimizer

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


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_moments_in_one_block_take_the_same_steps(name, fused):
    """Also of kernels whose channels lie last in memory, and of numbers that do not fill a whole group."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(5, 3)).to(memory_format=torch.channels_last)
    ends = []
    for in_block in (False, True):
        model = copy.deepcopy(made)
        optimizer = getattr(optimizers, name)(model.parameters(), 0.05, weight_decay=0.1, fused=fused)
        assert optimizers.moments_fit(list(model.parameters()))
        if in_block:
            optimizers.zero_moments(optimizer)
            assert all(float(state["exp_avg"].abs().sum()) == 0 for state in optimizer.state.values())
        images = torch.linspace(-1, 1, 54).reshape(2, 3, 3, 3)
        for _ in range(3):
            optimizer.zero_grad()
            model(images).square().sum().backward()
            optimizer.step()
        ends.append([one.detach() for one in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_a_kept_optimiser_is_fresh_again(monkeypatch):
    """As on a GPU: the same steps as with a new one, at the learning rate of the round."""
    settings = Optimizer(name="adam", lr=0.05, weight_decay=0.1, decay_every=1, decay=0.5)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    ends = []
    for kept in (None, {}):
        model, found = network(), []
        for round in (1, 2):
            optimizer = settings.make(model.parameters(), round, kept)
            found.append(optimizer)
            train(model, optimizer)
        assert (found[0] is found[1]) == (kept is not None)
        assert optimizer.param_groups[0]["lr"] == 0.025
        ends.append([one.detach() for one in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))
