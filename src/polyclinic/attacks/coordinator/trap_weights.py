"""Trap weights (Boenisch et al. 2023, "When the Curious Abandon Honesty"): units that are dead for nearly all images.

Half of a row's weights, drawn at random, are negative, and the positive ones are made a little shorter. The sum is then
negative for nearly every image, ReLU gives 0, and the row has no gradient. A row that is alive for one image only holds
that image: its gradient of the weight over that of the bias.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from polyclinic.attacks.coordinator.crafting import (
    CoordinatorAttack,
    Update,
    activation,
    dense_layer,
    input_of,
    inputs_of_rows,
    invert_front,
    open_front,
    values_of,
    without_repeats,
)
from polyclinic.errors import BadInput
from polyclinic.randomness import torch_rng


class TrapWeights(CoordinatorAttack):
    """`crafted = attack.craft(model, public)`; `attack.recover(update, crafted, public)` gives images."""

    name: Literal["trap-weights"] = "trap-weights"
    strength: float = Field(1.0, gt=0, le=1, description="the share of the layer's rows that are traps")
    alive: float = Field(
        0.03, gt=0, lt=1, description="the share of images for which a row is alive; best near 1 / images of a batch"
    )
    seed: int = Field(0, description="which weights are negative")

    @property
    def assumptions(self) -> str:
        return "ReLU follows the layer, and the site takes one step, or small ones, without clipping or noise"

    @torch.no_grad()
    def craft(self, model: nn.Module, public: Tensor) -> nn.Module:
        """A copy with traps, set so that each row is alive for a share of the attacker's own images [M, C, H, W]."""
        if activation(model) is not nn.ReLU:
            raise BadInput("attack: trap weights need ReLU, since tanh is never dead; use 'imprint'")
        name, _ = dense_layer(model)  # first: fronts of other networks cannot be opened
        crafted = open_front(model)
        layer = dense_layer(crafted)[1]
        rows, width = round(self.strength * layer.out_features), layer.in_features
        rng = torch_rng(self.seed, "trap weights")
        size = torch.randn(rows, width, generator=rng).abs() / width**0.5
        negative = torch.rand(rows, width, generator=rng).argsort(1) < width // 2
        inputs = values_of(input_of(crafted, name), public)
        down, up = inputs @ (size * negative).T, inputs @ (size * ~negative).T
        # alive is: shorter * up > down
        shorter = torch.quantile(down / up.clamp(min=1e-12), self.alive, dim=0)
        layer.weight[:rows] = torch.where(negative, -size, size * shorter[:, None])
        layer.bias[:rows] = 0
        layer.weight[rows:] = 0
        layer.bias[rows:] = -1
        return crafted

    def recover(self, update: Update, crafted: nn.Module, public: Tensor) -> Tensor:
        """The images [K, C, H, W] of rows that were alive. A row alive for several images gives a mixture."""
        name, _ = dense_layer(crafted)
        inputs = without_repeats(inputs_of_rows(update[f"{name}.weight"], update[f"{name}.bias"]))
        return invert_front(input_of(crafted, name), inputs, public)
