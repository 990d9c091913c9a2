"""The loop in which generators learn."""

from __future__ import annotations

import torch
from torch import nn

from polyclinic.training.generator_loop import Objective, Schedule, descend


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
