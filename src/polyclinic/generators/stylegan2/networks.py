"""StyleGAN2's networks. The generator: from noise and label to styles (mapping), and from styles to images (synthesis).

Images lie in [-1, 1] here. The synthesis network adds up images of all sizes (a skip generator).
The discriminator is residual, has the spread of a batch as a feature, and is conditioned by projection.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.generators.base import LabelEmbedding
from polyclinic.generators.stylegan2.layers import EPS, GAIN, Conv, Finish, Linear, StyledConv, activate, doubled, unit
from polyclinic.tasks import Target

FIRST_SIDE = 4


class StyleGAN2Shape(NamedTuple):
    """What images look like, and how large the networks for them are. `size` is a power of two."""

    channels: int
    size: int
    target: Target
    width: int
    latent: int
    mapping_layers: int
    #: layers between a label and what the discriminator multiplies its features with; 0 takes the embedding itself
    label_layers: int = 0
    #: what is left of the mean style after a batch
    style_memory: float = 0.998

    @property
    def sides(self) -> list[int]:
        """Of all feature maps, from 4 to the image's."""
        found = [FIRST_SIDE]
        while found[-1] < self.size:
            found.append(2 * found[-1])
        return found

    def wide(self, side: int) -> int:
        """Channels of the feature maps with this side."""
        return self.width * min(self.size // side, 8)


#: how much slower than the rest mapping networks learn
SPEED = 0.01


def slow_layers(widths: list[int]) -> nn.ModuleList:
    """The layers of a mapping network."""
    pairs = itertools.pairwise(widths)
    return nn.ModuleList(Linear(inputs, outputs, speed=SPEED, gain=GAIN) for inputs, outputs in pairs)


class Mapping(nn.Module):
    """Noise [B, latent] and labels [B] to styles w [B, latent]. Keeps their running mean, for truncation."""

    def __init__(self, shape: StyleGAN2Shape) -> None:
        super().__init__()
        self.memory = shape.style_memory
        self.label = LabelEmbedding(shape.target, shape.latent)
        self.layers = slow_layers([2 * shape.latent] + [shape.latent] * shape.mapping_layers)
        self.register_buffer("mean", torch.zeros(shape.latent))

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        w = torch.cat([unit(noise), unit(self.label(labels))], 1)
        for layer in self.layers:
            w = activate(layer(w))
        return w

    @torch.no_grad()
    def remember(self, w: Tensor) -> None:
        self.get_buffer("mean").lerp_(w.float().mean(0), 1 - self.memory)


class Block(nn.Module):
    """Feature maps of one size: two convolutions (one at the first size), and an image of that size."""

    def __init__(self, inputs: int, outputs: int, shape: StyleGAN2Shape, *, first: bool) -> None:
        super().__init__()
        self.first = first
        if not first:
            self.enlarge, self.enlarged = StyledConv(inputs, outputs, 3, shape.latent, up=True), Finish(outputs)
        self.conv, self.finish = StyledConv(outputs, outputs, 3, shape.latent), Finish(outputs)
        self.to_image = StyledConv(outputs, shape.channels, 1, shape.latent, demodulate=False)
        self.image_bias = nn.Parameter(torch.zeros(shape.channels, 1, 1))

    def forward(
        self, x: Tensor, image: Tensor | None, styles: Sequence[Tensor], noises: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Three styles (two at the first size): for each convolution, and for the image."""
        *of_convs, of_image = styles
        if not self.first:
            x = self.enlarged(*self.enlarge(x, of_convs[0]), noises[0])
        x = self.finish(*self.conv(x, of_convs[-1]), noises[-1])
        made = self.to_image(x, of_image)[0].float() + self.image_bias
        return x, made if image is None else doubled(image) + made


class Synthesis(nn.Module):
    """Styles [B, layers, latent] to images [B, C, size, size]."""

    def __init__(self, shape: StyleGAN2Shape) -> None:
        super().__init__()
        self.sides = shape.sides
        widths = [shape.wide(side) for side in self.sides]
        self.start = nn.Parameter(torch.randn(widths[0], FIRST_SIDE, FIRST_SIDE))
        pairs = zip([widths[0], *widths], widths, strict=False)
        self.blocks = nn.ModuleList(
            Block(inputs, outputs, shape, first=place == 0) for place, (inputs, outputs) in enumerate(pairs)
        )

    @property
    def layers(self) -> int:
        """How many styles an image takes; an image of one size shares its style with the next size's first layer."""
        return 2 * len(self.sides)

    @property
    def noise_sides(self) -> list[int]:
        """Sides of the noise maps, in the order in which they are used."""
        return [side for place, side in enumerate(self.sides) for _ in range(1 if place == 0 else 2)]

    def forward(self, styles: Tensor, noises: Sequence[Tensor]) -> Tensor:
        """`noises` [B or 1, 1, side, side], one for each of `noise_sides`."""
        x, image, at = self.start.expand(len(styles), -1, -1, -1), None, 0
        used = 0
        for block in self.blocks:
            count = 1 if block.first else 2
            of_block = [styles[:, at + k] for k in range(count + 1)]
            x, image = block(x, image, of_block, noises[used : used + count])
            at, used = at + count, used + count
        assert image is not None
        return image


class StyleGenerator(nn.Module):
    """Noise and labels to images. `mapping` and `synthesis` can also be used one by one."""

    def __init__(self, shape: StyleGAN2Shape) -> None:
        super().__init__()
        self.mapping, self.synthesis = Mapping(shape), Synthesis(shape)

    def forward(self, styles: Tensor, noises: Sequence[Tensor]) -> Tensor:
        return self.synthesis(styles, noises)

    def repeated(self, w: Tensor) -> Tensor:
        """One style for all layers: [B, latent] to [B, layers, latent]."""
        return w[:, None].expand(-1, self.synthesis.layers, -1)

    def truncated(self, w: Tensor, share: float) -> Tensor:
        """Styles moved towards their mean; a share of 1 leaves them where they are."""
        return torch.lerp(self.mapping.get_buffer("mean").to(w), w, share) if share < 1 else w


# --- discriminator --------------------------------------------------------------------------------


#: images whose spread is taken together
GROUP = 4


class DiscriminatorBlock(nn.Module):
    """Feature maps to those of half the side: two convolutions, and a shortcut of one."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = Conv(inputs, inputs, 3, gain=GAIN)
        # the sum of two has twice the variance of one: both are scaled by the root of a half
        self.reduce = Conv(inputs, outputs, 3, down=True, gain=GAIN * math.sqrt(0.5))
        self.shortcut = Conv(inputs, outputs, 1, down=True, bias=False, gain=math.sqrt(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce.active(self.conv.active(x)) + self.shortcut(x)


class Spread(nn.Module):
    """Adds a channel: the standard deviation over GROUP images that follow each other, one number for each group.

    It lets the discriminator notice images that are all alike. It also makes the gradient of one image depend on
    others, so that a network with this layer cannot be trained with differential privacy.
    """

    mixes_samples = True

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        size = math.gcd(batch, GROUP)
        groups = x.float().reshape(batch // size, size, channels, height, width)
        spread = (groups.var(1, unbiased=False) + EPS).sqrt().mean((1, 2, 3))
        plane = spread[:, None].expand(-1, size).reshape(batch, 1, 1, 1).expand(-1, 1, height, width)
        return torch.cat([x, plane.to(x.dtype)], 1)


class Features(nn.Module):
    """Images [B, C, size, size] in [-1, 1] to features [B, width]: all of a discriminator but its last layer."""

    def __init__(self, shape: StyleGAN2Shape, *, spread: bool = True) -> None:
        super().__init__()
        sides = shape.sides[::-1]
        self.widths = [shape.wide(side) for side in sides]
        last = self.widths[-1]
        self.from_image = Conv(shape.channels, self.widths[0], 1, gain=GAIN)
        self.blocks = nn.ModuleList(DiscriminatorBlock(*pair) for pair in itertools.pairwise(self.widths))
        self.spread = Spread() if spread else nn.Identity()
        self.last = Conv(last + spread, last, 3, gain=GAIN)
        self.dense = Linear(last * FIRST_SIDE**2, last, gain=GAIN)

    def features(self, images: Tensor) -> Tensor:
        x = self.from_image.active(images)
        for block in self.blocks:
            x = block(x)
        x = self.last.active(self.spread(x))
        return activate(self.dense(x.flatten(1)))


class Discriminator(Features):
    """Images [B, C, size, size] in [-1, 1] and labels [B] to scores [B], without a bound."""

    def __init__(self, shape: StyleGAN2Shape) -> None:
        super().__init__(shape)
        self.score = Linear(self.widths[-1], shape.latent)
        self.label = LabelEmbedding(shape.target, shape.latent)
        self.label_layers = slow_layers([shape.latent] * (shape.label_layers + 1))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.features(images)
        known = unit(self.label(labels).float())
        for layer in self.label_layers:
            known = activate(layer(known)).float()
        return (self.score(x).float() * known).sum(1) / math.sqrt(known.shape[1])


class SiteDiscriminator(Features):
    """The same network with an output for each site and without labels: images to logits [B, sites].

    It has no spread, as its batches hold images of all sites. Images that are smaller than the network's side are
    enlarged by repeating their border, as real ones are.
    """

    def __init__(self, shape: StyleGAN2Shape, sites: int) -> None:
        super().__init__(shape, spread=False)
        self.side = shape.size
        self.score = Linear(self.widths[-1], sites)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        missing = self.side - images.shape[-1]
        if missing:
            images = F.pad(images, (0, missing, 0, missing), mode="replicate")
        return self.score(self.features(images)).float()
