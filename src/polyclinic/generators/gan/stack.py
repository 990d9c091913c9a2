"""Stacked networks: many networks of one shape computed as one, with `torch.func.vmap`.

Their weights are stacked, and their images have an axis in front. Convolutions become grouped ones, or batches of
matrix products; the backward pass is autograd's. Each network computes what it would compute alone, up to rounding.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from polyclinic.generators.base import Progress
from polyclinic.generators.gan.model import REPORTS, GANModel, StepDraws, both_steps, gan_steps_are_recorded
from polyclinic.generators.gan.networks import OfEachClass, compute_as_products, update_spectral_norms
from polyclinic.generators.gan.trainer import GANTrainer, RealBatches
from polyclinic.training.gpu.graphs import GraphedStep


class StackedNetworks:
    """M networks of one shape; `parameters` and `buffers` by name, [M, ...].

    `as_products`: compute convolutions as matrix products, which is faster on a GPU. `in_turns`: see `OfEachClass`.
    """

    def __init__(self, networks: Sequence[nn.Module], *, as_products: bool = False, in_turns: bool = False) -> None:
        self.parameters, self.buffers = stack_module_state(list(networks))
        # only its layers are used: the weights are those in the stack
        self.layout = copy.deepcopy(networks[0]).train()
        compute_as_products(self.layout, as_products)
        for layer in self.layout.modules():
            if isinstance(layer, OfEachClass):
                layer.in_turns = in_turns
        self._forward = vmap(self._one)

    def _one(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], *inputs: Tensor) -> Tensor:
        return functional_call(self.layout, (parameters, buffers), inputs)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Each input [M, ...]: network m gets entry m of it."""
        return self._forward(self.parameters, self.buffers, *inputs)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {**self.parameters, **self.buffers}

    def state(self, member: int) -> dict[str, Tensor]:
        """The state dict of one network, as a copy on the CPU."""
        return {name: tensor[member].detach().cpu().clone() for name, tensor in self.tensors.items()}


class StackedGAN:
    """Generators, their EMAs and discriminators of M sites, as `GANNetworks`."""

    def __init__(self, members: Sequence[nn.ModuleDict], *, as_products: bool = False) -> None:
        self.parts: dict[str, StackedNetworks] = {
            part: StackedNetworks([networks[part] for networks in members], as_products=as_products, in_turns=True)
            for part in ("generator", "average", "discriminator")
        }

    def generate(self, noise: Tensor, labels: Tensor) -> Tensor:
        return self.parts["generator"](noise, labels)

    def score(self, images: Tensor, labels: Tensor) -> Tensor:
        return self.parts["discriminator"](images, labels)[..., 0]

    def update_spectral_norms(self) -> None:
        discriminator = self.parts["discriminator"]
        update_spectral_norms(discriminator.layout, discriminator.tensors)

    @torch.no_grad()
    def update_ema(self, decay: float | Tensor) -> None:
        average, now = self.parts["average"].tensors, self.parts["generator"].tensors
        floats = [name for name in now if now[name].is_floating_point()]
        here, there = [average[name] for name in floats], [now[name] for name in floats]
        if isinstance(decay, Tensor):
            away = torch._foreach_sub(there, here)
            torch._foreach_mul_(away, 1 - decay)
            torch._foreach_add_(here, away)
        else:
            torch._foreach_lerp_(here, there, 1 - decay)
        for name in now.keys() - floats:
            average[name].copy_(now[name])

    @property
    def generator(self) -> list[Any]:
        return list(self.parts["generator"].parameters.values())

    @property
    def generator_buffers(self) -> list[Tensor]:
        return list(self.parts["generator"].buffers.values())

    @property
    def discriminator(self) -> list[Any]:
        return list(self.parts["discriminator"].parameters.values())

    def state(self, member: int) -> dict[str, Tensor]:
        """What `GANModel.load` of one site takes."""
        return {f"{part}.{n}": t for part, stacked in self.parts.items() for n, t in stacked.state(member).items()}


# --- training -------------------------------------------------------------------------------------


#: steps whose mean loss is told
LAST = 100


class Learner(NamedTuple):
    """A site's GAN, and what it learns from; all of a stack have batches of one size and one shape of images."""

    model: GANModel
    images: np.ndarray
    labels: np.ndarray
    rng: torch.Generator
    progress: Progress = lambda *_: None


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
            if step <= most and step % max(1, most // REPORTS) == 0:
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
