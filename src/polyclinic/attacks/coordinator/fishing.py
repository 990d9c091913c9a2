"""Fishing (Wen et al. 2022, "Fishing for User Data in Large-Batch Federated Learning via Gradient Magnification").

Only the last layer changes, so it works on every classifier, those with batch norm and a mean over the image included.

`craft` fishes for a class: all classes but one have constant scores far above it. An image of another class then sends
no gradient through the network; the gradient is that of the class's images alone. If that is one image, the last
layer's gradient is its feature vector, exactly.

`craft_cut` separates images of a class over several rounds: the class's score rises steeply where one feature passes a
bound. Between two rounds with neighbouring bounds, the gradient changes by the images between them only, and the change
of the bias counts them.
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
    dense_layer,
    input_of,
    invert_front,
    linear_layers,
    open_front,
)
from polyclinic.attacks.gradient_inversion.analytic import input_of_linear
from polyclinic.errors import BadInput


class Fishing(CoordinatorAttack):
    """`craft` or, over several rounds, `craft_cut`; then `read_features`, and `recover` where a dense layer exists."""

    name: Literal["fishing"] = "fishing"
    target_class: int = Field(0, ge=0, description="the class whose images are wanted")
    strength: float = Field(
        30.0, gt=0, description="how far the other classes' scores lie above (`craft`), or the slope (`craft_cut`)"
    )
    open_convolutions: bool = Field(False, description="open the convolutions as well, to get images back")

    needs: ClassVar[Capabilities] = CoordinatorAttack.needs | {Capability.CANDIDATES}
    assumptions: ClassVar[str] = (
        "the site sends the gradient of all its images, or of the same batch each round, without noise"
    )

    @torch.no_grad()
    def craft(self, model: nn.Module, public: Tensor) -> nn.Module:
        """A copy in which the target class alone sends gradients."""
        crafted, measured, direction = self._begin(model, public)
        _, head, row = self._head(crafted)
        head.weight[row] = direction / measured.std().clamp(min=1e-12)
        head.bias[row] = -self.strength - measured.mean() / measured.std().clamp(min=1e-12)
        return crafted

    @torch.no_grad()
    def craft_cut(self, model: nn.Module, public: Tensor, share: float) -> nn.Module:
        """A copy whose score for the class rises where a feature passes the bound that this share is expected below."""
        crafted, measured, direction = self._begin(model, public)
        _, head, row = self._head(crafted)
        deviations = torch.special.ndtri(torch.tensor(share, dtype=torch.float64)).to(measured)
        slope = self.strength / measured.std().clamp(min=1e-12)
        head.weight[row] = slope * direction
        head.bias[row] = -slope * (measured.mean() + measured.std() * deviations)
        return crafted

    def _begin(self, model: nn.Module, public: Tensor) -> tuple[nn.Module, Tensor, Tensor]:
        """A copy whose last layer is zero; what the attacker's own images [M] measure along the direction [F] in which
        their features differ most, and the direction."""
        crafted = open_front(model) if self.open_convolutions else copy.deepcopy(model)
        name, head, _ = self._head(crafted)
        twin = copy.deepcopy(crafted).train()  # batch norm: by the images at hand, as at the site
        features = input_of(twin, name)(public)
        direction = torch.linalg.svd(features - features.mean(0), full_matrices=False).Vh[0]
        head.weight.zero_()
        head.bias.zero_()
        return crafted, features @ direction, direction

    def _head(self, model: nn.Module) -> tuple[str, nn.Linear, int]:
        """The last layer, its name, and the row of the class."""
        layers = linear_layers(model)
        if not layers or layers[-1][1].bias is None:
            raise BadInput("attack: fishing needs a last linear layer with a bias; the network has none")
        name, head = layers[-1]
        row = self.target_class if head.out_features > 1 else 0
        if row >= head.out_features:
            raise BadInput(f"attack: target_class {row} is not one of 0 to {head.out_features - 1}")
        return name, head, row

    def read_features(self, update: Update, crafted: nn.Module) -> Tensor:
        """The features [F] of the image behind an update, or behind the change between two; a mean if several are."""
        name, _, row = self._head(crafted)
        return update[f"{name}.weight"][row] / update[f"{name}.bias"][row]

    def count(self, first: Update, second: Update, crafted: nn.Module, images: int) -> float:
        """How many of a site's `images` lie between the bounds of two rounds."""
        name, _, row = self._head(crafted)
        return images * abs(float(first[f"{name}.bias"][row] - second[f"{name}.bias"][row]))

    @torch.no_grad()
    def identify(self, features: Tensor, crafted: nn.Module, candidates: Tensor) -> int:
        """Which of the candidates [M, C, H, W] has the nearest features."""
        found = input_of(copy.deepcopy(crafted).train(), self._head(crafted)[0])(candidates)
        return int((found - features).norm(dim=1).argmin())

    def recover(self, update: Update, crafted: nn.Module, public: Tensor) -> Tensor:
        """The one image [1, C, H, W] behind an update, through the dense layer; `open_convolutions` helps much."""
        name, _ = dense_layer(crafted)
        found = input_of_linear(update[f"{name}.weight"][None], update[f"{name}.bias"][None])
        return invert_front(input_of(crafted, name), found.inputs, public)


def change(first: Update, second: Update) -> dict[str, Tensor]:
    """What two rounds' updates differ by."""
    return {name: first[name] - second[name] for name in first}
