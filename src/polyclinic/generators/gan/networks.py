"""The networks of a GAN: a generator and a discriminator, of dense layers (the first GAN) or convolutions (DCGAN).

Images lie in [-1, 1] here. No forward pass changes a buffer, except batch norm in the generator: so the same code works
under `torch.func.vmap`, where many sites' networks of one shape train as one.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.generators.base import LabelEmbedding
from polyclinic.models.backbone import norm_layer
from polyclinic.tasks import Target
from polyclinic.training.gpu.stacked_layers import AllAtOnce, double_stacked, halve_stacked

#: how a label enters a discriminator: not at all, as one more channel of the image (Mirza and Osindero 2014), or by the
#: product of its vector and the image's features (Miyato and Koyama 2018); or there are networks of their own for each
#: class, which need no label (PrivGAN's code trains one class at a time)
Condition = Literal["none", "plane", "projection", "apart"]
#: what keeps a discriminator smooth
DiscriminatorNorm = Literal["spectral", "group", "none"]

SMALLEST_SIDE = 4  # of a feature map
SLOPE = 0.2
LABEL_WIDTH = 8  # numbers that tell a generator its label
LARGEST_GROUP = 8  # images whose spread is taken together


class GANShape(NamedTuple):
    """What images look like, and how large the networks for them are."""

    channels: int
    size: int
    target: Target
    width: int
    latent: int


# --- layers -------------------------------------------------------------------------------------------


class Down(nn.Conv2d):
    """A convolution that halves the side; `as_products` says how it is computed in a stack of networks, not what."""

    as_products = False
    in_order = False  # whether what it gives must lie channel by channel in memory

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__(channels, outputs, 4, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.apply_weight(images, self.weight)

    def apply_weight(self, images: Tensor, weight: Tensor) -> Tensor:
        if not self.as_products:
            return F.conv2d(images, weight, self.bias, self.stride, self.padding)
        found = AllAtOnce.apply(halve_stacked, images, weight, self.bias)
        return found.contiguous() if self.in_order else found


class Up(nn.ConvTranspose2d):
    """A transposed convolution that doubles the side."""

    as_products = False
    in_order = False

    def __init__(self, channels: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__(channels, outputs, 4, 2, 1, bias=bias)

    def forward(self, images: Tensor, output_size: list[int] | None = None) -> Tensor:
        if not self.as_products:
            return super().forward(images)
        found = AllAtOnce.apply(double_stacked, images, self.weight, self.bias)
        return found.contiguous() if self.in_order else found


def compute_as_products(network: nn.Module, wanted: bool = True) -> None:
    """Have all layers of a network that can be computed as matrix products in a stack, or not."""
    # under vmap norms know no other layout
    in_order = any(isinstance(layer, nn.GroupNorm | nn.BatchNorm2d) for layer in network.modules())
    for layer in network.modules():
        if isinstance(layer, Down | Up):
            layer.as_products, layer.in_order = wanted, in_order


FIRST_TURNS = 15


class Spectral(nn.Module):
    """A layer whose weight is divided by its largest singular value (Miyato et al. 2018).

    The singular vectors are an estimate that `update_spectral_norms` alone moves, once in a discriminator's step.
    """

    left: Tensor
    right: Tensor

    def __init__(self, layer: nn.Linear | Down) -> None:
        super().__init__()
        self.layer = layer
        rows, columns = layer.weight.flatten(1).shape
        self.register_buffer("left", F.normalize(torch.randn(rows), dim=0))
        self.register_buffer("right", F.normalize(torch.randn(columns), dim=0))
        for _ in range(FIRST_TURNS):  # a first estimate takes many turns
            update_spectral_norms(self)

    def forward(self, inputs: Tensor) -> Tensor:
        weight = self.layer.weight
        sigma = (self.left * (weight.flatten(1) * self.right).sum(1)).sum()  # no product that autocast would round
        if isinstance(self.layer, Down):
            return self.layer.apply_weight(inputs, weight / sigma)
        return F.linear(inputs, weight / sigma, self.layer.bias)


@torch.no_grad()
def update_spectral_norms(network: Any) -> None:
    """One power iteration for every layer with a spectral norm, of a network or of `StackedNetworks`."""
    paths = [path for path, layer in network.named_modules() if isinstance(layer, Spectral)]
    tensors = network.state_dict() if paths else {}
    for path in paths:
        at = f"{path}." if path else ""
        left, right = tensors[f"{at}left"], tensors[f"{at}right"]
        matrix = tensors[f"{at}layer.weight"].reshape(*left.shape, -1)
        right.copy_(F.normalize(torch.einsum("...rc,...r->...c", matrix, left), dim=-1))
        left.copy_(F.normalize(torch.einsum("...rc,...c->...r", matrix, right), dim=-1))


class MinibatchSpread(nn.Module):
    """One more channel that says how much the images of a small group differ (Karras et al. 2018).

    A generator that makes one image only is found out at once. Groups are neighbours in the batch, so a batch must be
    all real or all made.
    """

    mixes_samples = True

    def forward(self, features: Tensor) -> Tensor:
        rows = len(features)
        groups = features.reshape(rows // math.gcd(rows, LARGEST_GROUP), -1, *features.shape[1:]).float()
        spread = (groups.var(1, correction=0) + 1e-8).sqrt().mean((1, 2, 3))
        channel = spread.repeat_interleave(rows // len(groups))[:, None, None, None]
        return torch.cat([features, channel.expand(-1, 1, *features.shape[2:]).to(features.dtype)], 1)


class BatchNorm(nn.BatchNorm2d):
    """Batch norm in float32, whatever the arithmetic around it: stacked networks know no other."""

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features.float()).to(features.dtype)


def _generating(norm: Literal["batch", "group"], channels: int) -> nn.Module:
    return BatchNorm(channels) if norm == "batch" else norm_layer("group", channels)


class NoiseWithLabel(nn.Module):
    """Noise [B, latent] and labels [B] to the rows that a generator starts from, [B, width].

    The label's vector is short, and there is no bias: what is the same in all images of a batch moves with every step
    of Adam, and along a long vector so fast that a generator would move all its images as one and forget the noise.
    """

    def __init__(self, target: Target, latent: int) -> None:
        super().__init__()
        known = bool(target.classes) or target.label_range is not None
        self.width = latent + (LABEL_WIDTH if known else 0)
        self.label = LabelEmbedding(target, LABEL_WIDTH) if known else None

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        if self.label is None:
            return noise
        return torch.cat([noise, self.label(labels) / LABEL_WIDTH**0.5], 1)


def _discriminating(layer: nn.Linear | Down, norm: DiscriminatorNorm) -> nn.Module:
    """A hidden layer of a discriminator with its norm."""
    if norm == "spectral":
        return Spectral(layer)
    if norm == "none":
        return layer
    wide = layer.out_channels if isinstance(layer, Down) else layer.out_features
    return nn.Sequential(layer, norm_layer("group", wide))


def doublings(size: int) -> tuple[int, int]:
    """The side of the smallest feature map, and how often it doubles to reach `size` or a little more."""
    times = max(1, math.ceil(math.log2(size / SMALLEST_SIDE)))
    return -(-size // 2**times), times


# --- dense --------------------------------------------------------------------------------------------


class DenseGenerator(nn.Module):
    """Noise [B, latent] and labels [B] to images [B, C, H, W], through two hidden layers."""

    def __init__(self, shape: GANShape) -> None:
        super().__init__()
        self.out = (shape.channels, shape.size, shape.size)
        self.start = NoiseWithLabel(shape.target, shape.latent)
        wide = 8 * shape.width
        self.body = nn.Sequential(
            nn.Linear(self.start.width, wide),
            nn.LeakyReLU(SLOPE),
            nn.Linear(wide, 2 * wide),
            nn.LeakyReLU(SLOPE),
            nn.Linear(2 * wide, math.prod(self.out)),
        )

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        made = self.body(self.start(noise, labels))
        return torch.tanh(made.float()).reshape(-1, *self.out)


class DenseDiscriminator(nn.Module):
    """Images [B, C, H, W] in [-1, 1] and labels [B] to scores [B, outputs], without a bound."""

    def __init__(self, shape: GANShape, condition: Condition, norm: DiscriminatorNorm, outputs: int) -> None:
        super().__init__()
        self.condition = condition
        pixels, wide = shape.channels * shape.size**2, 8 * shape.width
        known = shape.latent if condition == "plane" else 0
        self.body = nn.Sequential(
            _discriminating(nn.Linear(pixels + known, 2 * wide), norm),
            nn.LeakyReLU(SLOPE),
            _discriminating(nn.Linear(2 * wide, wide), norm),
            nn.LeakyReLU(SLOPE),
        )
        self.head = nn.Linear(wide, outputs)
        if condition != "none":
            self.label = LabelEmbedding(shape.target, known or wide)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        rows = images.flatten(1)
        if self.condition == "plane":
            rows = torch.cat([rows, self.label(labels)], 1)
        features = self.body(rows)
        scores = self.head(features)
        if self.condition == "projection":
            scores = scores + (features * self.label(labels)).sum(1, keepdim=True)
        return scores.float()


# --- convolutions -------------------------------------------------------------------------------------


class ConvGenerator(nn.Module):
    """Noise [B, latent] and labels [B] to images [B, C, H, W], through transposed convolutions."""

    def __init__(self, shape: GANShape, norm: Literal["batch", "group"]) -> None:
        super().__init__()
        self.size = shape.size
        side, times = doublings(shape.size)
        widths = [shape.width * min(2**k, 8) for k in reversed(range(times))]
        self.first = (widths[0], side, side)
        self.start = NoiseWithLabel(shape.target, shape.latent)
        self.spread = nn.Linear(self.start.width, math.prod(self.first), bias=False)
        layers: list[nn.Module] = [_generating(norm, widths[0]), nn.ReLU()]
        for before, after in itertools.pairwise(widths):
            layers += [Up(before, after, bias=False), _generating(norm, after), nn.ReLU()]
        layers.append(Up(widths[-1], shape.channels))
        self.body = nn.Sequential(*layers)

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        first = self.spread(self.start(noise, labels)).reshape(-1, *self.first)
        made = self.body(first)[..., : self.size, : self.size]
        return torch.tanh(made.float())


class ImageDiscriminator(nn.Module):
    """Images [B, C, H, W] in [-1, 1] and labels [B] to scores [B, outputs], without a bound: convolutions (`body`), a
    `head`, and the `label` as the `condition` has it. Images are enlarged to the side `whole` by their border."""

    condition: Condition
    whole: int
    body: nn.Module
    spread: nn.Module
    head: nn.Module
    label: nn.Module

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        missing = self.whole - images.shape[-1]
        if missing:
            images = F.pad(images, (0, missing, 0, missing), mode="replicate")
        if self.condition == "plane":
            plane = self.label(labels).reshape(-1, 1, self.whole, self.whole)
            images = torch.cat([images, plane.to(images.dtype)], 1)
        features = self.body(images)
        scores = self.head(self.spread(features).flatten(1))
        if self.condition == "projection":
            scores = scores + (features.mean((2, 3)) * self.label(labels)).sum(1, keepdim=True)
        return scores.float()


class ConvDiscriminator(ImageDiscriminator):
    """A DCGAN's, with its norms."""

    def __init__(
        self, shape: GANShape, condition: Condition, norm: DiscriminatorNorm, outputs: int, spread: bool
    ) -> None:
        super().__init__()
        side, times = doublings(shape.size)
        self.condition, self.whole = condition, side * 2**times
        widths = [shape.width * min(2**k, 8) for k in range(times)]
        layers: list[nn.Module] = []
        before = shape.channels + (condition == "plane")
        for place, after in enumerate(widths):
            wanted = "none" if norm == "group" and place == 0 else norm  # the first one sees pixels as they are
            layers += [_discriminating(Down(before, after), wanted), nn.LeakyReLU(SLOPE)]
            before = after
        self.body = nn.Sequential(*layers)
        self.spread = MinibatchSpread() if spread else nn.Identity()
        features = (widths[-1] + spread) * side**2
        head = nn.Linear(features, outputs)
        self.head = Spectral(head) if norm == "spectral" else head
        if condition != "none":
            self.label = LabelEmbedding(shape.target, self.whole**2 if condition == "plane" else widths[-1])


# --- both ---------------------------------------------------------------------------------------------


class OfEachClass(nn.Module):
    """A network for each class, none of which is told a label: each gets the rows of its own class.

    `in_turns`: classes take turns row by row (0, 1, 0, 1, ...), as in balanced batches. Then no shape depends on the
    labels' values, which stacked networks and CUDA graphs need.
    """

    in_turns = False

    def __init__(self, target: Target, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.of_class = nn.ModuleList([build() for _ in target.classes])

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        if self.in_turns:
            many = len(self.of_class)
            each = [network(rows[k::many], labels[k::many]) for k, network in enumerate(self.of_class)]
            return torch.stack(each, 1).flatten(0, 1)
        by_class = labels.argsort(stable=True)
        counts = torch.bincount(labels, minlength=len(self.of_class)).tolist()
        parts = zip(self.of_class, rows[by_class].split(counts), labels[by_class].split(counts), strict=True)
        # batch norm has nothing to learn from no rows; where there are none at all, their shape is still asked for
        done = torch.cat([network(own, known) for network, own, known in parts if len(own) or not len(rows)])
        return done[by_class.argsort()]


def for_each_class(shape: GANShape, apart: bool, build: Callable[[GANShape], nn.Module]) -> nn.Module:
    """One network; with `apart` one for each class, none of which is told a label."""
    if not apart:
        return build(shape)
    return OfEachClass(shape.target, lambda: build(shape._replace(target=Target())))
