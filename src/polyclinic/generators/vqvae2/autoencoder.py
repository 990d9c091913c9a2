"""The two-level autoencoder of VQ-VAE-2 (Razavi et al. 2019): a network from images to codes and back.

Nothing here adds in place, keeps statistics of a batch or calls a module twice, so per-sample gradients (Opacus)
can follow it. Upsampling is a convolution and a shuffle of pixels: Opacus has no fast path for transposed
convolutions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.generators.vqvae2.codebook import Codebook, Learning, Moved, Quantised


class Residual(nn.Module):
    """x plus a 3x3 and a 1x1 convolution of it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.relu1 = nn.ReLU()
        self.conv1 = nn.Conv2d(channels, channels // 2, 3, padding=1)
        self.relu2 = nn.ReLU()
        self.conv2 = nn.Conv2d(channels // 2, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        if suits_a_gpu(x, (self.conv1, self.conv2)):
            return x + convolved(self.conv2, self.relu2(convolved(self.conv1, self.relu1(x))))
        return x + self.conv2(self.relu2(self.conv1(self.relu1(x))))


def residuals(channels: int, blocks: int) -> list[nn.Module]:
    return [*(Residual(channels) for _ in range(blocks)), nn.ReLU()]


def halve(channels: int, out: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, out, 4, stride=2, padding=1), nn.ReLU()]


def down(channels: int, width: int, cell: int) -> list[nn.Module]:
    """From pixels to a grid with one place for `cell` x `cell` of them."""
    if cell == 1:
        return [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
    return halve(channels, width) if cell == 2 else [*halve(channels, width // 2), *halve(width // 2, width)]


def up(width: int, channels: int, cell: int) -> list[nn.Module]:
    """From the grid of `down` back to pixels."""
    if cell == 1:
        return [nn.Conv2d(width, channels, 3, padding=1)]
    if cell == 2:
        return double(width, channels)
    return [*double(width, width // 2), nn.ReLU(), *double(width // 2, channels)]


def double(channels: int, out: int) -> list[nn.Module]:
    """Twice the side. The four pixels made of one start out alike, or images would start as a checkerboard."""
    conv = nn.Conv2d(channels, 4 * out, 3, padding=1)
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.copy_(parameter[::4].repeat_interleave(4, 0))
    return [conv, nn.PixelShuffle(2)]


#: a GPU's tensor cores take channels in groups of so many; with three, or twelve, convolutions are slow
GROUPED = 8


def through(layers: nn.Sequential, x: Tensor) -> Tensor:
    """The layers one after another; of images with channels last, on a GPU, in the way that suits it there.

    Not so in private learning: Opacus follows calls of whole modules.
    """
    if not suits_a_gpu(x, layers):
        return layers(x)
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            x = convolved(layer, x)
        elif isinstance(layer, nn.PixelShuffle):
            x = shuffled(x)
        else:
            x = layer(x)
    return x


def suits_a_gpu(x: Tensor, layers: Iterable[nn.Module]) -> bool:
    """Whether to compute in the way that suits a GPU: the result is the same up to rounding. Private learning watches
    layers by hooks, which they must not be passed by; images of one channel have both layouts."""
    laid_out = x.is_cuda and x.is_contiguous(memory_format=torch.channels_last)
    return laid_out and not any(layer._forward_hooks for layer in layers)


def convolved(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """A convolution; with channels of zeros on both sides, so that their numbers are multiples of GROUPED."""
    assert conv.bias is not None, "all convolutions here have one"
    if conv.in_channels < GROUPED and conv.stride == (2, 2) and conv.kernel_size == (4, 4):
        y = halved(conv, x)
        return y + conv.bias.to(y.dtype)[:, None, None]
    more, others = -conv.in_channels % GROUPED, -conv.out_channels % GROUPED
    x = F.pad(x, (0, 0, 0, 0, 0, more)) if more else x
    weight = F.pad(conv.weight, (0, 0, 0, 0, 0, more, 0, others)) if more or others else conv.weight
    y = F.conv2d(x, weight, None, conv.stride, conv.padding)[:, : conv.out_channels]
    return y + conv.bias.to(y.dtype)[:, None, None]


def halved(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """A convolution of 4 x 4 pixels with a stride of 2, as one of 2 x 2 cells of four pixels: few channels are slow."""
    x, weight = F.pixel_unshuffle(F.pad(x, (1, 1, 1, 1)), 2), F.pixel_unshuffle(conv.weight, 2)
    more = -x.shape[1] % (2 * GROUPED)
    x = F.pad(x, (0, 0, 0, 0, 0, more)).contiguous(memory_format=torch.channels_last)
    return F.conv2d(x, F.pad(weight, (0, 0, 0, 0, 0, more)))


def shuffled(x: Tensor) -> Tensor:
    """`nn.PixelShuffle(2)` that leaves channels last."""
    batch, channels, height, width = x.shape
    cells = x.reshape(batch, channels // 4, 2, 2, height, width).permute(0, 4, 2, 5, 3, 1)
    return cells.reshape(batch, 2 * height, 2 * width, channels // 4).permute(0, 3, 1, 2)


class Pass(NamedTuple):
    """What one pass of images [B, C, H, W] through the autoencoder gives."""

    images: Tensor  #: the reconstruction, [B, C, H, W]
    top_latents: Tensor
    bottom_latents: Tensor
    top: Quantised
    bottom: Quantised


class Autoencoder(nn.Module):
    """Images float [B, C, size, size] in [0, 1] to a `Pass`.

    The bottom level has a code for `cell` x `cell` pixels, the top level one for twice as many along a side. Other
    sizes than multiples of that are padded inside with copies of the border, and cropped back.
    """

    def __init__(
        self,
        *,
        channels: int,
        size: int,
        width: int,
        blocks: int,
        code_width: int,
        top_codes: int,
        bottom_codes: int,
        learning: Learning,
        cell: int = 4,
    ) -> None:
        super().__init__()
        self.size, self.ratio = size, 2 * cell
        self.encode_bottom = nn.Sequential(
            *down(channels, width, cell),
            nn.Conv2d(width, width, 3, padding=1),
            *residuals(width, blocks),
        )
        self.encode_top = nn.Sequential(
            *halve(width, width), nn.Conv2d(width, width, 3, padding=1), *residuals(width, blocks)
        )
        self.to_top = nn.Conv2d(width, code_width, 1)
        self.top_codebook = Codebook(top_codes, code_width, learning)
        self.decode_top = nn.Sequential(
            nn.Conv2d(code_width, width, 3, padding=1), *residuals(width, blocks), *double(width, code_width)
        )
        self.to_bottom = nn.Conv2d(width + code_width, code_width, 1)
        self.bottom_codebook = Codebook(bottom_codes, code_width, learning)
        self.lift_top = nn.Sequential(*double(code_width, code_width))
        self.decode_bottom = nn.Sequential(
            nn.Conv2d(2 * code_width, width, 3, padding=1),
            *residuals(width, blocks),
            *up(width, channels, cell),
        )

    @property
    def grid(self) -> int:
        """Codes of the top level along a side; the bottom level has twice as many."""
        return -(-self.size // self.ratio)

    def forward(self, images: Tensor) -> Pass:
        top_latents, top, bottom_latents, bottom = self._quantised(images)
        return Pass(self._images(top.vectors, bottom.vectors), top_latents, bottom_latents, top, bottom)

    def encode(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The codes int64 of images, [B, g, g] of the top level and [B, 2g, 2g] of the bottom level."""
        _, top, _, bottom = self._quantised(images)
        return top.codes, bottom.codes

    def decode(self, top: Tensor, bottom: Tensor) -> Tensor:
        """The images of int64 codes [B, g, g] and [B, 2g, 2g]."""
        return self._images(self.top_codebook.lookup(top), self.bottom_codebook.lookup(bottom))

    @torch.no_grad()
    def start(self, images: Tensor, rng: torch.Generator) -> None:
        """Put both codebooks where the latents of these images lie: the top one first, as the bottom follows it."""
        self.top_codebook.start(self(images).top_latents, rng)
        self.bottom_codebook.start(self(images).bottom_latents, rng)

    def move_codebooks(self, passed: Pass) -> list[Moved]:
        """A step of codebooks that learn by moving averages, as a GPU can record it; nothing for codebooks that learn
        by gradient. `revive_codes` ends it."""
        if self.top_codebook.learning == "gradient":
            return []
        top = self.top_codebook.move(passed.top_latents, passed.top.codes)
        return [top, self.bottom_codebook.move(passed.bottom_latents, passed.bottom.codes)]

    def revive_codes(self, moved: Sequence[Moved], rng: torch.Generator) -> None:
        """New places for dead codes. With a generator of the GPU it can be recorded, too."""
        for book, one in zip((self.top_codebook, self.bottom_codebook), moved, strict=False):
            if rng.device.type == "cuda":
                book.revive_unasked(one, rng)
            else:
                book.revive(one, rng)

    def _quantised(self, images: Tensor) -> tuple[Tensor, Quantised, Tensor, Quantised]:
        """Latents and what stands for them: of the top level, then of the bottom level, which sees the top's codes."""
        coarse = through(self.encode_bottom, self._padded(images) * 2 - 1)
        top_latents = self._latents(self.to_top, through(self.encode_top, coarse))
        top = self.top_codebook(top_latents)
        joined = torch.cat([coarse, through(self.decode_top, top.vectors)], 1)
        bottom_latents = self._latents(self.to_bottom, joined)
        return top_latents, top, bottom_latents, self.bottom_codebook(bottom_latents)

    @staticmethod
    def _latents(conv: nn.Conv2d, x: Tensor) -> Tensor:
        return convolved(conv, x) if suits_a_gpu(x, (conv,)) else conv(x)

    def _images(self, top: Tensor, bottom: Tensor) -> Tensor:
        decoded = through(self.decode_bottom, torch.cat([through(self.lift_top, top), bottom], 1))
        return (decoded[..., : self.size, : self.size] + 1) / 2

    def _padded(self, images: Tensor) -> Tensor:
        missing = self.grid * self.ratio - self.size
        return F.pad(images, (0, missing, 0, missing), mode="replicate") if missing else images


def losses(images: Tensor, passed: Pass, commitment: float) -> Tensor:
    """The loss of each image, [B]: reconstruction + codebook + commitment, of both levels.

    Squared errors are means: over pixels in [-1, 1], and over the numbers of the latents. The codebook term moves
    only the codebook (nothing where it learns by moving averages), the commitment term only the encoder.
    """
    reconstruction = 4 * (passed.images.float() - images).square().mean((1, 2, 3))
    codebook = passed.top.codebook + passed.bottom.codebook
    return reconstruction + codebook + commitment * (passed.top.commitment + passed.bottom.commitment)


def noise_images(count: int, channels: int, size: int, rng: torch.Generator) -> Tensor:
    """Cloudy noise in [0, 1], [count, channels, size, size]: about as smooth as an image, and about no one.

    Codes that start at its latents are in reach of real ones, where codes drawn at random are not, and no patient
    has been looked at, which differential privacy needs.
    """
    total = torch.zeros(count, channels, size, size)
    for side in (2, 4, 8, 16):
        coarse = torch.randn(count, channels, side, side, generator=rng)
        total = total + F.interpolate(coarse, size=size, mode="bilinear") / side**0.5
    return (0.5 + 0.22 * total / total.std()).clamp(0, 1)
