"""Adam for many targets: torch's numbers, decay, signs and box."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polyclinic.attacks.solvers.optimizers import Adam
from polyclinic.randomness import torch_rng


def slope(x: Tensor) -> Tensor:
    return torch.cos(3 * x) + x


def start(count: int = 3, size: int = 5) -> Tensor:
    return torch.randn(count, size, generator=torch_rng("adam"), dtype=torch.float64)


def run(optimizer: Adam) -> Tensor:
    while bool(optimizer.active.any()):
        optimizer.update(optimizer.point.sum(1), slope(optimizer.point))
    return optimizer.point


@pytest.mark.parametrize("decoupled", [True, False])
def test_steps_are_torchs(decoupled: bool):
    begin = start()
    found = run(Adam(begin, lr=0.01, steps=20, weight_decay=0.1, decoupled=decoupled, decay=0.1, decay_at=(0.5,)))
    x = begin.clone()
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([x], lr=0.01, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [10], gamma=0.1)
    for _ in range(20):
        x.grad = slope(x)
        optimizer.step()
        schedule.step()
    torch.testing.assert_close(found, x, rtol=1e-12, atol=1e-14)


def test_signs_and_box():
    begin = torch.full((1, 3), 0.5)
    optimizer = Adam(begin, lr=0.1, steps=30, signed=True, box=(2, 0.0, 1.0))
    while bool(optimizer.active.any()):
        optimizer.update(torch.zeros(1), torch.tensor([[1e-6, -1e6, 1.0]]))
    assert optimizer.point[0, :2].tolist() == [0.0, 1.0]
    assert optimizer.point[0, 2] == pytest.approx(0.5 - 30 * 0.1, rel=1e-4)  # free to leave


def test_a_target_whose_gradient_has_vanished_stays_where_it_is():
    """Momentum would carry it on."""
    optimizer = Adam(start(2), lr=0.1, steps=10)
    for step in range(10):
        gradient = torch.ones(2, 5, dtype=torch.float64)
        gradient[1] = 0.0 if step >= 3 else 1.0
        optimizer.update(torch.ones(2, dtype=torch.float64), gradient)
        if step == 2:
            there = optimizer.point[1].clone()
    assert optimizer.converged.tolist() == [False, True]
    assert torch.equal(optimizer.point[1], there)
    assert not torch.equal(optimizer.point[0], optimizer.point[1])


def test_a_diverging_target_stops_alone():
    begin = start()
    wild = Adam(begin, lr=0.01, steps=10)
    for step in range(10):
        gradient = slope(wild.point)
        loss = wild.point.sum(1)
        loss[1] = torch.nan if step >= 4 else loss[1]
        wild.update(loss, gradient)
    calm = run(Adam(begin, lr=0.01, steps=10))
    assert wild.diverged.tolist() == [False, True, False]
    assert torch.equal(wild.point[[0, 2]], calm[[0, 2]])
    assert not torch.equal(wild.point[1], calm[1])
