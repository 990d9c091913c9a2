"""The trajectory of a search: where each target stood, and at which loss, when it had taken chosen numbers of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Trajectory:
    """By target and chosen step: points [N, K, D] and losses [N, K]; a target that had finished stands still."""

    steps: tuple[int, ...]
    points: Tensor
    loss: Tensor


class Recorder:
    """Keeps points at chosen steps; tensor arithmetic on fixed shapes, so that a CUDA graph can hold it."""

    def __init__(self, steps: Sequence[int], point: Tensor) -> None:
        """`steps`: ascending numbers of steps, 0 being the start; `point` [N, D]: where the targets start."""
        never = torch.iinfo(torch.long).max
        self.steps = tuple(steps)
        self.wanted = torch.tensor([*steps, never], device=point.device)
        self.next = torch.zeros(len(point), dtype=torch.long, device=point.device)  # the place to be filled next
        self.points = point[:, None].repeat(1, len(self.steps) + 1, 1)  # the last place is for what nobody asked for
        self.loss = torch.full_like(self.points[..., 0], torch.nan)

    def note(self, point: Tensor, loss: Tensor, taken: Tensor) -> None:
        """Take the loss [N] at `point` [N, D], where each target has taken so many steps [N]."""
        due = taken >= self.wanted[self.next]
        rows = torch.arange(len(point), device=point.device)
        place = torch.where(due, self.next, len(self.steps))
        self.points[rows, place] = point
        self.loss[rows, place] = loss
        self.next += due

    def select_rows(self, rows: Tensor) -> None:
        for name in ("next", "points", "loss"):
            setattr(self, name, getattr(self, name)[rows])

    def result(self, point: Tensor, loss: Tensor) -> Trajectory:
        """What was kept; a target that has not come so far is where it ended, at `point` [N, D] with `loss` [N]."""
        places = torch.arange(len(self.steps), device=point.device)
        open_places = places >= self.next[:, None]
        points = torch.where(open_places[..., None], point[:, None], self.points[:, :-1])
        return Trajectory(self.steps, points, torch.where(open_places, loss[:, None], self.loss[:, :-1]))
