"""The overflow filter: weights with which one candidate image overflows, and no other image does.

A unit compares the image with the candidate and is exactly 0 for every other image; behind it are weights near the
largest number of float32. If the candidate is among the site's images, the update holds infinity or NaN, or the site
refuses to send it; if it is not, all is as usual. The answer needs no gradient to be read, so noise does not help:
the site must treat both alike. This attack was found on an earlier version of Polyclinic.
"""

from __future__ import annotations

import copy
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from polyclinic.attacks.attack import Capabilities, Capability
from polyclinic.attacks.coordinator.crafting import (
    CoordinatorAttack,
    Update,
    activation,
    dense_layer,
    input_of,
    linear_layers,
)

#: tanh of this is exactly 1 in float32
SATURATED = 20.0


class OverflowFilter(CoordinatorAttack):
    """`crafted = attack.craft(model, candidate, public)`; `attack.recover(update)` is True for a member."""

    name: Literal["overflow-filter"] = "overflow-filter"
    strength: float = Field(3e38, gt=0, lt=3.4e38, description="the largest weight; below about 1e37 nothing overflows")
    margin: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="where the unit begins to answer, from the nearest other image (0) to the candidate (1)",
    )

    needs: ClassVar[Capabilities] = CoordinatorAttack.needs | {Capability.CANDIDATES}
    assumptions: ClassVar[str] = "the site sends, refuses or fails in another way when a number is not finite"

    @torch.no_grad()
    def craft(self, model: nn.Module, candidate: Tensor, public: Tensor) -> nn.Module:
        """A copy that overflows for `candidate` [C, H, W]; `public` [M, C, H, W] are others that must not."""
        crafted = copy.deepcopy(model)
        name, layer = dense_layer(crafted)
        front = input_of(crafted, name)
        own, others = front(candidate[None])[0], front(public)
        direction = own - others.mean(0)
        response = others @ direction
        bound = response.max() + self.margin * ((own @ direction) - response.max())
        relu = activation(model) is nn.ReLU
        # twice the saturated value at the candidate, as much below the bound for others
        steep = 2 * SATURATED / ((own @ direction) - bound).clamp(min=1e-12)
        layer.weight.zero_()
        layer.bias.zero_()
        layer.weight[0] = steep * direction
        layer.bias[0] = -steep * bound
        following = [one for _, one in linear_layers(crafted)[1:]]
        for place, one in enumerate(following):
            _pass_on(one, is_last=one is following[-1], raised=not relu and place == 0, strength=self.strength)
        return crafted

    def recover(self, update: Update | None) -> bool:
        """Whether the candidate was among the images: an update with infinity or NaN, or none at all (refused)."""
        return update is None or not all(bool(tensor.isfinite().all()) for tensor in update.values())


def _pass_on(layer: nn.Linear, *, is_last: bool, raised: bool, strength: float) -> None:
    """Pass on the first unit alone. `raised`: it is -1 where it should be 0 (tanh), so 1 is added."""
    size = strength if is_last else 1.0  # more would overflow on the way back, for every image
    layer.weight.zero_()
    if layer.bias is not None:
        layer.bias.zero_()
    rows = torch.arange(len(layer.weight)) if is_last else torch.tensor([0, 1])
    layer.weight[rows, 0] = size * (1 - 2 * (rows % 2)).to(layer.weight)
    if is_last:
        layer.weight[:, 1] = -layer.weight[:, 0]  # two such units: one alone may stay below the largest number
    if raised and layer.bias is not None:
        layer.bias[rows] = layer.weight[rows, 0]
