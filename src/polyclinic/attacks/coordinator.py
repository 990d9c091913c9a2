"""Attacks of a coordinator that chooses weights: `craft` makes a network whose weights are sent, `recover` reads what a
site answers. They run no code at a site.

Imprinting (Fowl et al. 2022, "Robbing the Fed"): every row of a linear layer measures the same number of an image, its
brightness, and has another threshold. Only images above a row's threshold are in its gradient, so the difference of two
neighbouring rows holds the images between two thresholds; of one image, weight over bias is the layer's input. Tanh
needs no difference: a row has a gradient only for images near its threshold. The paper adds a layer; here the first
linear layer that sees the whole image is used, and the convolutions before it are opened.

Fishing (Wen et al. 2022): only the last layer changes, so it works on every classifier. `craft` gives all classes but
one constant scores far above it, so that the gradient is that of the class's images alone; of one image, the last
layer's gradient is its feature vector. `craft_cut` separates images of a class over several rounds: its score rises
steeply where one feature passes a bound, and between two rounds with neighbouring bounds the gradient changes by the
images between them only, which the change of the bias counts.

The overflow filter compares the image with one candidate: a unit is exactly 0 for every other image, and behind it are
weights near the largest number of float32. If the candidate is among the site's images, the update holds infinity or
NaN, or the site refuses to send it. The answer needs no gradient to be read, so noise does not help: the site must
treat both alike. It was found on an earlier version of Polyclinic.
"""

import copy
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from polyclinic.attacks import crafting
from polyclinic.attacks.attack import AttackSettings, Capabilities, Capability
from polyclinic.attacks.gradient_inversion.analytic import input_of_linear
from polyclinic.errors import BadInput
from polyclinic.randomness import torch_rng


class CoordinatorAttack(AttackSettings):
    """An attack by weights of the attacker's choice, read from a gradient or from a difference of weights."""

    reads: ClassVar[tuple[str, ...]] = ("gradients", "weights")
    needs: ClassVar[Capabilities] = frozenset(
        {Capability.GRADIENTS, Capability.ARCHITECTURE, Capability.SIMILAR_IMAGES, Capability.CHOSEN_WEIGHTS}
    )


# --- bins and traps in a dense layer --------------------------------------------------------------------------


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
        _, layer = crafting.dense_layer(model)
        rng = torch_rng(self.seed, "imprint", "direction")
        direction = torch.randn(layer.in_features, generator=rng) if self.measure == "random" else None
        return imprint(model, public, _bins(self.strength, layer.out_features), direction, gain=self.gain)

    def recover(self, update: crafting.Update, crafted: nn.Module, public: Tensor) -> Tensor:
        """The images [K, C, H, W] of bins in use. A bin with several images gives a mixture of them."""
        _, layer = crafting.dense_layer(crafted)
        return read_bins(update, crafted, public, _bins(self.strength, layer.out_features))


def _bins(strength: float, rows: int, begin: int = 0) -> range:
    return range(begin, begin + max(2, round(strength * rows)))


@torch.no_grad()
def imprint(
    model: nn.Module, public: Tensor, rows: range, direction: Tensor | None = None, *, gain: float = 1.0
) -> nn.Module:
    """A copy of `model` in which `rows` of the dense layer are bins; its other rows are dead: no gradient.

    `direction` [in] is what every bin multiplies its input by; brightness if not given.
    """
    if len(public) < 2 or len(rows) < 2:
        raise BadInput("attack: bins need two rows or more, and two images or more of the attacker's own")
    crafted = crafting.open_front(model)
    name, layer = crafting.dense_layer(crafted)
    inputs = crafting.values_of(crafting.input_of(crafted, name), public)
    direction = torch.ones(layer.in_features) if direction is None else direction
    direction = (direction / direction.norm()).to(inputs)
    measured = inputs @ direction
    shares = (torch.arange(len(rows)) + 0.5) / len(rows)  # of the attacker's own images between two thresholds
    bounds = torch.quantile(measured, shares.to(measured))
    relu = crafting.activation(model) is nn.ReLU
    steepness = gain / measured.std() if relu else 2 * gain / (bounds[1:] - bounds[:-1]).mean()
    places = torch.arange(rows.start, rows.stop)
    layer.weight.zero_()
    layer.bias.fill_(-1.0 if relu else 20.0)
    layer.weight[places] = steepness * direction
    layer.bias[places] = -steepness * bounds
    # the next layer weighs all bins alike, so that an image has the same gradient in each of them
    following = crafting.linear_layers(crafted)[1][1]
    column = following.weight[:, 0].clone()
    if float(column.norm()) == 0:
        column = torch.linspace(-1, 1, len(column)).to(column)
    following.weight.zero_()
    following.weight[:, places] = (column / column.norm() / len(places))[:, None]
    return crafted


def read_bins(update: crafting.Update, crafted: nn.Module, public: Tensor, rows: range) -> Tensor:
    """The images of bins: `rows` of the dense layer, in the order of their thresholds."""
    name, _ = crafting.dense_layer(crafted)
    weight, bias = (update[f"{name}.{part}"][rows.start : rows.stop] for part in ("weight", "bias"))
    if crafting.activation(crafted) is nn.ReLU:
        weight, bias = (torch.cat([part[:-1] - part[1:], part[-1:]]) for part in (weight, bias))
    return crafting.images_of_rows(crafted, name, weight, bias, public)


class TrapWeights(CoordinatorAttack):
    """`crafted = attack.craft(model, public)`; `attack.recover(update, crafted, public)` gives images."""

    name: Literal["trap-weights"] = "trap-weights"
    strength: float = Field(1.0, gt=0, le=1, description="the share of the layer's rows that are traps")
    alive: float = Field(0.03, gt=0, lt=1, description="share of images for which a row is alive; best near 1 / batch")
    seed: int = Field(0, description="which weights are negative")

    assumptions: ClassVar[str] = (
        "ReLU follows the layer, and the site takes one step, or small ones, without clipping or noise"
    )

    @torch.no_grad()
    def craft(self, model: nn.Module, public: Tensor) -> nn.Module:
        """A copy with traps, set so that each row is alive for a share of the attacker's own images [M, C, H, W]."""
        if crafting.activation(model) is not nn.ReLU:
            raise BadInput("attack: trap weights need ReLU, since tanh is never dead; use 'imprint'")
        name, _ = crafting.dense_layer(model)  # first: fronts of other networks cannot be opened
        crafted = crafting.open_front(model)
        layer = crafting.dense_layer(crafted)[1]
        rows, width = round(self.strength * layer.out_features), layer.in_features
        rng = torch_rng(self.seed, "trap weights")
        size = torch.randn(rows, width, generator=rng).abs() / width**0.5
        negative = torch.rand(rows, width, generator=rng).argsort(1) < width // 2
        inputs = crafting.values_of(crafting.input_of(crafted, name), public)
        down, up = inputs @ (size * negative).T, inputs @ (size * ~negative).T
        # alive is: shorter * up > down
        shorter = torch.quantile(down / up.clamp(min=1e-12), self.alive, dim=0)
        layer.weight[:rows] = torch.where(negative, -size, size * shorter[:, None])
        layer.bias[:rows] = 0
        layer.weight[rows:] = 0
        layer.bias[rows:] = -1
        return crafted

    def recover(self, update: crafting.Update, crafted: nn.Module, public: Tensor) -> Tensor:
        """The images [K, C, H, W] of rows that were alive. A row alive for several images gives a mixture."""
        name, _ = crafting.dense_layer(crafted)
        return crafting.images_of_rows(crafted, name, update[f"{name}.weight"], update[f"{name}.bias"], public)


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
        _, layer = crafting.dense_layer(model)
        share = layer.out_features // self.sites if self.separate else layer.out_features
        return _bins(self.strength, share, share * site if self.separate else 0)

    def craft(self, model: nn.Module, public: Tensor, site: int = 0) -> nn.Module:
        """A copy for this site, with bins over the range of the attacker's own images [M, C, H, W]."""
        return imprint(model, public, self.rows(model, site))

    def recover(self, update: crafting.Update, crafted: nn.Module, public: Tensor, site: int = 0) -> Tensor:
        """The images [K, C, H, W] that a site's bins hold, from the sum (or the mean) of all sites' updates."""
        return read_bins(update, crafted, public, self.rows(crafted, site))


# --- the last layer -------------------------------------------------------------------------------------------


class Fishing(CoordinatorAttack):
    """`craft` or, over several rounds, `craft_cut`; then `read_features`, and `recover` where a dense layer exists."""

    name: Literal["fishing"] = "fishing"
    target_class: int = Field(0, ge=0, description="the class whose images are wanted")
    strength: float = Field(30.0, gt=0, description="how far other scores lie above (`craft`), slope (`craft_cut`)")
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
        crafted = crafting.open_front(model) if self.open_convolutions else copy.deepcopy(model)
        name, head, _ = self._head(crafted)
        twin = copy.deepcopy(crafted).train()  # batch norm: by the images at hand, as at the site
        features = crafting.input_of(twin, name)(public)
        direction = torch.linalg.svd(features - features.mean(0), full_matrices=False).Vh[0]
        head.weight.zero_()
        head.bias.zero_()
        return crafted, features @ direction, direction

    def _head(self, model: nn.Module) -> tuple[str, nn.Linear, int]:
        """The last layer, its name, and the row of the class."""
        layers = crafting.linear_layers(model)
        if not layers or layers[-1][1].bias is None:
            raise BadInput("attack: fishing needs a last linear layer with a bias; the network has none")
        name, head = layers[-1]
        row = self.target_class if head.out_features > 1 else 0
        if row >= head.out_features:
            raise BadInput(f"attack: target_class {row} is not one of 0 to {head.out_features - 1}")
        return name, head, row

    def read_features(self, update: crafting.Update, crafted: nn.Module) -> Tensor:
        """The features [F] of the image behind an update, or behind the change between two; a mean if several are."""
        name, _, row = self._head(crafted)
        return update[f"{name}.weight"][row] / update[f"{name}.bias"][row]

    def count(self, first: crafting.Update, second: crafting.Update, crafted: nn.Module, images: int) -> float:
        """How many of a site's `images` lie between the bounds of two rounds."""
        name, _, row = self._head(crafted)
        return images * abs(float(first[f"{name}.bias"][row] - second[f"{name}.bias"][row]))

    @torch.no_grad()
    def identify(self, features: Tensor, crafted: nn.Module, candidates: Tensor) -> int:
        """Which of the candidates [M, C, H, W] has the nearest features."""
        found = crafting.input_of(copy.deepcopy(crafted).train(), self._head(crafted)[0])(candidates)
        return int((found - features).norm(dim=1).argmin())

    def recover(self, update: crafting.Update, crafted: nn.Module, public: Tensor) -> Tensor:
        """The one image [1, C, H, W] behind an update, through the dense layer; `open_convolutions` helps much."""
        name, _ = crafting.dense_layer(crafted)
        found = input_of_linear(update[f"{name}.weight"][None], update[f"{name}.bias"][None])
        return crafting.invert_front(crafting.input_of(crafted, name), found.inputs, public)


# --- one candidate --------------------------------------------------------------------------------------------


#: tanh of this is exactly 1 in float32
SATURATED = 20.0


class OverflowFilter(CoordinatorAttack):
    """`crafted = attack.craft(model, candidate, public)`; `attack.recover(update)` is True for a member."""

    name: Literal["overflow-filter"] = "overflow-filter"
    strength: float = Field(3e38, gt=0, lt=3.4e38, description="the largest weight; below about 1e37 nothing overflows")
    margin: float = Field(
        0.5, gt=0, lt=1, description="where the unit answers: from the nearest other (0) to the candidate (1)"
    )

    needs: ClassVar[Capabilities] = CoordinatorAttack.needs | {Capability.CANDIDATES}
    assumptions: ClassVar[str] = "the site sends, refuses or fails in another way when a number is not finite"

    @torch.no_grad()
    def craft(self, model: nn.Module, candidate: Tensor, public: Tensor) -> nn.Module:
        """A copy that overflows for `candidate` [C, H, W]; `public` [M, C, H, W] are others that must not."""
        crafted = copy.deepcopy(model)
        name, layer = crafting.dense_layer(crafted)
        front = crafting.input_of(crafted, name)
        own, others = front(candidate[None])[0], front(public)
        direction = own - others.mean(0)
        response = others @ direction
        bound = response.max() + self.margin * ((own @ direction) - response.max())
        relu = crafting.activation(model) is nn.ReLU
        # twice the saturated value at the candidate, as much below the bound for others
        steep = 2 * SATURATED / ((own @ direction) - bound).clamp(min=1e-12)
        layer.weight.zero_()
        layer.bias.zero_()
        layer.weight[0] = steep * direction
        layer.bias[0] = -steep * bound
        following = [one for _, one in crafting.linear_layers(crafted)[1:]]
        for place, one in enumerate(following):
            _pass_on(one, is_last=one is following[-1], raised=not relu and place == 0, strength=self.strength)
        return crafted

    def recover(self, update: crafting.Update | None) -> bool:
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
