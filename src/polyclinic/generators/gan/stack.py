"""Stacked networks: many networks of one shape computed as one, with `torch.func.vmap`.

Their weights are stacked, and their images have an axis in front. Convolutions become grouped ones, or batches of
matrix products; the backward pass is autograd's. Each network computes what it would compute alone, up to rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from polyclinic.generators.gan.networks import OfEachClass, update_spectral_norms
from polyclinic.generators.gan.stacked_convolutions import compute_as_products


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
