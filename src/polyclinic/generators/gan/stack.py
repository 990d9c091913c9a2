"""Many networks of one shape as one: their weights stacked, their images in an axis in front.

A forward pass runs under `torch.func.vmap` (convolutions become grouped ones, or batches of matrix products), the way
back is autograd's. One network computes what it would compute alone, up to the order in which numbers are added.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from polyclinic.generators.gan.networks import refine
from polyclinic.generators.gan.stacked_convolutions import compute_as_products


class Stacked:
    """M networks of one shape; `parameters` and `buffers` by name, [M, ...]."""

    def __init__(self, networks: Sequence[nn.Module], *, as_products: bool = False) -> None:
        self.parameters, self.buffers = stack_module_state(list(networks))
        # only its layers are looked at: the weights are those in the stack
        self.layout = copy.deepcopy(networks[0]).train()
        compute_as_products(self.layout, as_products)
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


class StackedPairs:
    """Generators, their averages and discriminators of M owners, as a `Pair`."""

    def __init__(self, members: Sequence[nn.ModuleDict], *, as_products: bool = False) -> None:
        self.parts: dict[str, Stacked] = {
            part: Stacked([networks[part] for networks in members], as_products=as_products)
            for part in ("generator", "average", "discriminator")
        }

    def make(self, noise: Tensor, labels: Tensor) -> Tensor:
        return self.parts["generator"](noise, labels)

    def score(self, images: Tensor, labels: Tensor) -> Tensor:
        return self.parts["discriminator"](images, labels)[..., 0]

    def refine(self) -> None:
        judging = self.parts["discriminator"]
        refine(judging.layout, judging.tensors)

    @torch.no_grad()
    def follow(self, decay: float | Tensor) -> None:
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
    def discriminator(self) -> list[Any]:
        return list(self.parts["discriminator"].parameters.values())

    def state(self, member: int) -> dict[str, Tensor]:
        """What `GANModel.load` of one owner takes."""
        return {f"{part}.{n}": t for part, stacked in self.parts.items() for n, t in stacked.state(member).items()}
