"""GANs of several simulated sites that learn as one stack: what each learns alone, up to rounding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyclinic.generators.base import Progress
from polyclinic.generators.gan.batches import RealBatches
from polyclinic.generators.gan.model import (
    REPORTS,
    GANModel,
    StepDraws,
    both_steps,
    gan_steps_are_recorded,
)
from polyclinic.generators.gan.stack import StackedGAN
from polyclinic.generators.gan.trainer import GANTrainer
from polyclinic.training.gpu.graphs import GraphedStep

#: steps whose mean loss is told
LAST = 100


class Learner(NamedTuple):
    """A site's GAN, and what it learns from; all of a stack have batches of one size and one shape of images."""

    model: GANModel
    images: np.ndarray
    labels: np.ndarray
    rng: torch.Generator
    progress: Progress | None = None


class StackedSteps:
    """The steps of several GANs as one; on a GPU recorded as a CUDA graph. Each GAN has draws of its own."""

    def __init__(self, learners: Sequence[Learner]) -> None:
        first = learners[0].model
        cuda, graphed = first.device.type == "cuda", gan_steps_are_recorded(first)
        self.networks = StackedGAN([one.model.networks for one in learners], as_products=cuda)
        self.trainer = GANTrainer(
            self.networks,
            first.settings.spec,
            device=first.device,
            precision=first.precision,
            capturable=graphed and cuda,
        )
        self.drawn = [
            StepDraws(one.model, RealBatches(one.model, one.images, one.labels, one.rng), one.rng) for one in learners
        ]
        step = functools.partial(both_steps, self.trainer)
        self._take: Callable[..., Tensor] = GraphedStep(step, "a step of stacked GANs", graphed=graphed)

    def step(self) -> Tensor:
        """The generators' losses, [M]."""
        each = [one.draw(self.trainer) for one in self.drawn]
        return self._take(*(_stacked(parts) for parts in zip(*each, strict=True))).clone()


def fit_together(learners: Sequence[Learner]) -> list[dict[str, float]]:
    """What `GANModel.fit` does for each of several GANs. One whose steps are through goes on with the others, and what
    it learns then is not used."""
    steps = StackedSteps(learners)
    mosts = [one.model.settings.steps_on(len(one.images)) for one in learners]
    losses: list[Tensor] = []
    found: dict[int, dict[str, float]] = {}
    for step in range(1, max(mosts) + 1):
        losses = [*losses[-LAST + 1 :], steps.step()]
        for place, (learner, most) in enumerate(zip(learners, mosts, strict=True)):
            if learner.progress is not None and step <= most and step % max(1, most // REPORTS) == 0:
                learner.progress("generator", step, most, _mean(losses, place))
            if step == most:
                learner.model.load(steps.networks.state(place))
                found[place] = {"generator": _mean(losses, place)}
    return [found[place] for place in range(len(learners))]


def _mean(losses: Sequence[Tensor], place: int) -> float:
    return float(torch.stack(list(losses))[:, place].mean())


def _stacked(parts: Sequence[Tensor | None]) -> Tensor | None:
    present = [one for one in parts if one is not None]
    return torch.stack(present) if present else None
