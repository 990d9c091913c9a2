"""Stacked networks: the networks of several simulated sites train as one, with `torch.func.vmap`.

Their weights are stacked, and their images have an axis in front. Each network computes what it would compute alone, up
to rounding: batch norm has each network's own statistics, and an optimiser works on each number by itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from polyclinic.training.graphs import GraphedFunction
from polyclinic.training.stacked_convolutions import all_at_once

#: output and targets of one network's batch to its mean loss
Loss = Callable[[Tensor, Tensor], Tensor]


class StackedModel:
    """M networks of the shape of `network`; `parameters` and `buffers` by name, [M, ...], on its device.

    `products`: compute convolutions as matrix products (`stacked_convolutions`), which is faster on a GPU.
    """

    def __init__(self, network: nn.Module, members: int, *, products: bool = False) -> None:
        self.members, self.products = members, products
        self.layout = copy.deepcopy(network).train()  # only its layers are used: the weights are those of the stack
        self.parameters = {
            name: nn.Parameter(_repeated(one, members), requires_grad=one.requires_grad)
            for name, one in network.named_parameters()
        }
        self.buffers = {name: _repeated(one, members) for name, one in network.named_buffers()}
        self._forward = vmap(self._one, randomness="different")

    def _one(self, parameters: Mapping[str, Tensor], buffers: dict[str, Tensor], images: Tensor) -> Tensor:
        return functional_call(self.layout, (dict(parameters), buffers), (images,))

    def __call__(self, images: Tensor) -> Tensor:
        """Images [M, B, C, H, W]: network m gets entry m of them."""
        if not self.products:
            return self._forward(self.parameters, self.buffers, images)
        with all_at_once(self.layout):
            return self._forward(self.parameters, self.buffers, images)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As a module's; what corrects gradients by name works on all networks at once."""
        return iter(self.parameters.items())

    @torch.no_grad()
    def load(self, member: int, weights: Mapping[str, Tensor]) -> None:
        own = {**self.parameters, **self.buffers}
        for name, value in weights.items():
            own[name][member].copy_(value, non_blocking=True)

    def state(self, member: int) -> dict[str, Tensor]:
        """The state dict of one network, copied."""
        names = self.layout.state_dict()
        own = {**self.parameters, **self.buffers}
        return {name: own[name][member].detach().clone() for name in names}


def _repeated(one: Tensor, members: int) -> Tensor:
    return one.detach()[None].repeat(members, *(1 for _ in one.shape))


class StackedGradients:
    """The loss of each network on its batch, and the gradients of all; recorded as a CUDA graph where `graphs`."""

    def __init__(self, model: StackedModel, loss: Loss, autocast: Callable[[], Any], *, graphs: bool) -> None:
        self.model, self.loss, self.autocast = model, vmap(loss), autocast
        self.trained = [one for one in model.parameters.values() if one.requires_grad]
        self.passes: Any = self._passes
        if graphs:
            self.passes = GraphedFunction(self._passes, "engine.graphs: a training step of stacked sites")

    def __call__(self, images: Tensor, targets: Tensor) -> Tensor:
        """The losses [M] of batches [M, B, ...]; gradients are left in the parameters' `grad`."""
        losses, gradients = self.passes(images, targets)
        for parameter, gradient in zip(self.trained, gradients, strict=True):
            parameter.grad = gradient
        return losses

    def _passes(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        with self.autocast():
            output = self.model(images)
        losses = self.loss(output.to(torch.promote_types(output.dtype, torch.float32)), targets)
        gradients = torch.autograd.grad(losses.sum(), self.trained)
        return losses.detach(), gradients
