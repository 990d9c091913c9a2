"""Fused optimisers: their state in one block, and one that is kept from round to round."""

import copy

import pytest
import torch
from torch import nn

from polyclinic.training.generator_loop import Objective, Schedule, descend
from polyclinic.training.optimizer import Optimizer, moments_fit, zero_moments


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


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_moments_in_one_block_take_the_same_steps(name, fused):
    """Also of kernels whose channels lie last in memory, and of numbers that do not fill a whole group."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(5, 3)).to(memory_format=torch.channels_last)
    ends = []
    for in_block in (False, True):
        model = copy.deepcopy(made)
        optimizer = getattr(torch.optim, name)(model.parameters(), 0.05, weight_decay=0.1, fused=fused)
        assert moments_fit(list(model.parameters()))
        if in_block:
            zero_moments(optimizer)
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


def test_what_a_loss_tells_is_seen_after_each_step_and_the_rate_follows_the_schedule() -> None:
    weight = nn.Parameter(torch.zeros(1))
    seen: list[float] = []

    def loss_of(rows: torch.Tensor) -> tuple[torch.Tensor, float]:
        return (weight - 1).square().sum() + 0 * rows.sum(), float(weight.detach())

    descend(
        Objective(
            [weight],
            lambda index: (torch.ones(len(index)),),
            loss_of,
            lambda before: seen.append(float(weight.detach()) - before),
        ),
        4,
        Schedule(epochs=3, batch_size=2, lr=0.1, decay=0.01, decay_every=1),
        torch.Generator().manual_seed(0),
    )
    assert len(seen) == 6, "two batches in each of three epochs, and one look after each"
    assert all(moved > 0 for moved in seen), "a look comes after the step, which moves the weight"
    assert min(seen[:2]) > 20 * max(seen[2:4]) > 0, "a hundredth of the rate after an epoch"
