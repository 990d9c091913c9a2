"""Imprinting (Fowl et al. 2022, "Robbing the Fed"): a linear layer that sorts images into bins.

Every row measures the same number of an image, its brightness, and has another threshold. Only the images above a
row's threshold are in its gradient, so the difference of two neighbouring rows holds the images between two thresholds.
Where that is one image, weight over bias is the input of the layer. Tanh instead of ReLU needs no difference: a row
has a gradient only for images near its threshold.

The paper adds a layer to the network. Here the network stays as it is: the first linear layer that sees the whole image
is used, and the convolutions before it are opened.
"""

from __future__ import annotations

from typing import ClassVar, Literal

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
    linear_layers,
    open_front,
    values_of,
    without_repeats,
)
from polyclinic.errors import BadInput
from polyclinic.randomness import torch_rng


class Imprint(CoordinatorAttack):
    """`crafted = attack.craft(model, public)`; `attack.recover(update, crafted, public)` gives images."""

    name: Literal["imprint"] = "imprint"
    strength: float = Field(1.0, gt=0, le=1, description="the share of the layer's rows that are bins")
    measure: Literal["brightness", "random"] = Field(
        "brightness", description="what sorts the images: their mean, or their product with one random image"
    )
    seed: int = Field(0, description="which random image, for the measure 'random'")
    gain: float = Field(1.0, gt=0, description="length of a crafted row, in units of the usual one")

    assumptions: ClassVar[str] = (
        "the site takes one step, or small ones, from the weights that it got, without clipping or noise"
    )

    def craft(self, model: nn.Module, public: Tensor) -> nn.Module:
        """A copy with bins over the range of the attacker's own images `public` [M, C, H, W]."""
        _, layer = dense_layer(model)
        rows = max(2, round(self.strength * layer.out_features))
        rng = torch_rng(self.seed, "imprint", "direction")
        direction = torch.randn(layer.in_features, generator=rng) if self.measure == "random" else None
        return imprint(model, public, range(rows), direction, gain=self.gain)

    def recover(self, update: Update, crafted: nn.Module, public: Tensor) -> Tensor:
        """The images [K, C, H, W] of bins in use. A bin with several images gives a mixture of them."""
        _, layer = dense_layer(crafted)
        rows = max(2, round(self.strength * layer.out_features))
        return read_bins(update, crafted, public, range(rows))


@torch.no_grad()
def imprint(
    model: nn.Module, public: Tensor, rows: range, direction: Tensor | None = None, *, gain: float = 1.0
) -> nn.Module:
    """A copy of `model` in which `rows` of the dense layer are bins; its other rows are dead: no gradient.

    `direction` [in] is what every bin multiplies its input by; brightness if not given.
    """
    if len(public) < 2 or len(rows) < 2:
        raise BadInput("attack: bins need two rows or more, and two images or more of the attacker's own")
    crafted = open_front(model)
    name, layer = dense_layer(crafted)
    inputs = values_of(input_of(crafted, name), public)
    direction = torch.ones(layer.in_features) if direction is None else direction
    direction = (direction / direction.norm()).to(inputs)
    measured = inputs @ direction
    bounds = _bounds(measured, len(rows))
    relu = activation(model) is nn.ReLU
    steepness = gain / measured.std() if relu else 2 * gain / (bounds[1:] - bounds[:-1]).mean()
    places = torch.arange(rows.start, rows.stop)
    layer.weight.zero_()
    layer.bias.fill_(-1.0 if relu else 20.0)
    layer.weight[places] = steepness * direction
    layer.bias[places] = -steepness * bounds
    _spread_evenly(crafted, places)
    return crafted


def _bounds(measured: Tensor, count: int) -> Tensor:
    """Thresholds [count] between which equal shares of the attacker's own images lie."""
    shares = (torch.arange(count) + 0.5) / count
    return torch.quantile(measured, shares.to(measured))


def _spread_evenly(crafted: nn.Module, places: Tensor) -> None:
    """Let the next layer weigh all bins alike, so that an image has the same gradient in each of them."""
    following = linear_layers(crafted)[1][1]
    column = following.weight[:, 0].clone()
    if float(column.norm()) == 0:
        column = torch.linspace(-1, 1, len(column)).to(column)
    following.weight.zero_()
    following.weight[:, places] = (column / column.norm() / len(places))[:, None]


def read_bins(update: Update, crafted: nn.Module, public: Tensor, rows: range) -> Tensor:
    """The images of bins: `rows` of the dense layer, in the order of their thresholds."""
    name, _ = dense_layer(crafted)
    weight, bias = update[f"{name}.weight"][rows.start : rows.stop], update[f"{name}.bias"][rows.start : rows.stop]
    if activation(crafted) is nn.ReLU:
        weight = torch.cat([weight[:-1] - weight[1:], weight[-1:]])
        bias = torch.cat([bias[:-1] - bias[1:], bias[-1:]])
    inputs = without_repeats(inputs_of_rows(weight, bias))
    return invert_front(input_of(crafted, name), inputs, public)


class TrapWeights(CoordinatorAttack):
    """`crafted = attack.craft(model, public)`; `attack.recover(update, crafted, public)` gives images."""

    name: Literal["trap-weights"] = "trap-weights"
    strength: float = Field(1.0, gt=0, le=1, description="the share of the layer's rows that are traps")
    alive: float = Field(
        0.03, gt=0, lt=1, description="the share of images for which a row is alive; best near 1 / images of a batch"
    )
    seed: int = Field(0, description="which weights are negative")

    assumptions: ClassVar[str] = (
        "ReLU follows the layer, and the site takes one step, or small ones, without clipping or noise"
    )

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


class CraftedSum(CoordinatorAttack):
    """`attack.craft(model, public, site)` for each site; then `attack.recover(total, crafted, public, site)`."""

    name: Literal["crafted-sum"] = "crafted-sum"
    sites: int = Field(2, ge=1, description="how many sites are in the sum")
    separate: bool = Field(True, description="each site gets weights of its own; otherwise all get the same")
    strength: float = Field(1.0, gt=0, le=1, description="the share of a site's rows that are bins")

    @property
    def assumptions(self) -> str:
        different = "each site may get other weights, " if self.separate else ""
        return f"{different}only the sum of the sites' updates is seen, without clipping or noise"

    def rows(self, model: nn.Module, site: int) -> range:
        """The rows of the dense layer that are bins of this site."""
        if not 0 <= site < self.sites:
            raise BadInput(f"attack: site {site} is not one of 0 to {self.sites - 1}")
        _, layer = dense_layer(model)
        share = layer.out_features // self.sites if self.separate else layer.out_features
        begin = share * site if self.separate else 0
        return range(begin, begin + max(2, round(self.strength * share)))

    def craft(self, model: nn.Module, public: Tensor, site: int = 0) -> nn.Module:
        """A copy for this site, with bins over the range of the attacker's own images [M, C, H, W]."""
        return imprint(model, public, self.rows(model, site))

    def recover(self, update: Update, crafted: nn.Module, public: Tensor, site: int = 0) -> Tensor:
        """The images [K, C, H, W] that a site's bins hold, from the sum (or the mean) of all sites' updates."""
        return read_bins(update, crafted, public, self.rows(crafted, site))
