"""The two-level autoencoder of VQ-VAE-2 (Razavi et al. 2019): a network from images to codes and back.

Each level has a codebook: the nearest of K vectors stands for each latent vector. Nothing here adds in place, keeps
statistics of a batch or calls a module twice, so per-sample gradients (Opacus) can follow it. Upsampling is a
convolution and a shuffle of pixels: Opacus has no fast path for transposed convolutions.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from polyclinic.generators.vqvae2.model import VQVAE2

Learning = Literal["ema", "gradient"]

DECAY = 0.99  # of the moving averages
DEAD = 0.05  # a code is dead when it is chosen less often than this share of an even spread
REVIVED = 0.1  # the share a code starts with when it is moved: not much more, so that it soon moves again if unused


class Quantised(NamedTuple):
    """latents [B, D, h, w], their codes int64 [B, h, w], vectors [B, D, h, w] with the gradient passed straight to
    the latents; codebook and commitment losses [B] of each image, means over its latent numbers."""

    latents: Tensor
    codes: Tensor
    vectors: Tensor
    codebook: Tensor
    commitment: Tensor


class Moved(NamedTuple):
    """A step of the moving averages: latents [n, D] and the codes [n] that they chose, the vectors [K, D] before it,
    and which codes [K] are dead after it."""

    rows: Tensor
    codes: Tensor
    before: Tensor
    dead: Tensor


class Codebook(nn.Module):
    """K vectors of D numbers. With `learning="gradient"` the codebook loss moves them (the paper's loss; an
    `nn.Embedding`, for which Opacus has per-sample gradients); with "ema" they are running means of the latents
    that chose them, which `move` and `revive` move after each step."""

    counts: Tensor
    sums: Tensor

    def __init__(self, size: int, width: int, learning: Learning) -> None:
        super().__init__()
        self.size, self.learning = size, learning
        self.vectors = nn.Embedding(size, width)
        if learning == "ema":
            self.vectors.weight.requires_grad_(False)
            self.register_buffer("counts", torch.zeros(size))
            self.register_buffer("sums", torch.zeros(size, width))

    def lookup(self, codes: Tensor) -> Tensor:
        """The vectors of codes: [B, h, w] -> [B, D, h, w]."""
        return self.vectors(codes).movedim(-1, 1).contiguous()

    def forward(self, latents: Tensor) -> Quantised:
        latents = latents.float()
        with torch.autocast(latents.device.type, enabled=False):
            every, rows = self.vectors.weight.detach().float(), latents.detach().movedim(1, -1)
            # the nearest code: |z - e|^2 less |z|^2, which is the same for every code
            codes = (every.square().sum(1) - 2 * rows @ every.T).argmin(-1)
        vectors = self.vectors(codes).movedim(-1, 1)
        if not (latents.is_cuda and latents.is_contiguous(memory_format=torch.channels_last)):
            vectors = vectors.contiguous()  # else channels are last in them, too
        codebook = (latents.detach() - vectors).square().mean((1, 2, 3))
        commitment = (vectors.detach() - latents).square().mean((1, 2, 3))
        return Quantised(latents, codes, latents + (vectors - latents).detach(), codebook, commitment)

    # --- learning without gradients ---------------------------------------------------------------

    @torch.no_grad()
    def start(self, latents: Tensor, rng: torch.Generator) -> None:
        """Put the codes where some of the first latents [B, D, h, w] lie, so that all of them have a chance of being
        chosen; each latent at most once while there are enough."""
        rows = latents.detach().float().movedim(1, -1).flatten(0, -2)
        order = torch.randperm(len(rows), generator=rng).repeat(-(-self.size // len(rows)))[: self.size]
        self.vectors.weight.copy_(rows[order.to(rows.device)])
        if self.learning == "ema":
            # from zero, the few codes chosen first would take all the weight and the others never come to life
            self.counts.fill_(1)
            self.sums.copy_(self.vectors.weight)

    @torch.no_grad()
    def move(self, quantised: Quantised) -> Moved:
        """One step of the moving averages; asks a GPU for no number, so that it can be recorded."""
        rows = quantised.latents.detach().movedim(1, -1).flatten(0, -2)
        codes = quantised.codes.flatten()
        # a product with one-hot rows: unlike scattered additions, the same every time on a GPU
        chosen = (codes[:, None] == torch.arange(self.size, device=rows.device)).to(rows.dtype)
        self.counts.lerp_(chosen.sum(0), 1 - DECAY)
        self.sums.lerp_(chosen.T @ rows, 1 - DECAY)
        before = self.vectors.weight.detach().clone()
        self.vectors.weight.copy_(self.sums / self.counts[:, None])
        return Moved(rows, codes, before, self.counts < DEAD * len(rows) / self.size)

    @torch.no_grad()
    def revive(self, moved: Moved, rng: torch.Generator) -> None:
        """Put dead codes to latents, the likelier the farther those lie from the code that they had chosen."""
        dead, rows, even = moved.dead.nonzero().flatten(), moved.rows, len(moved.rows) / self.size
        if len(dead):
            away = (rows - moved.before[moved.codes]).square().sum(1).double().cpu() + 1e-12
            places = torch.multinomial(away, len(dead), replacement=len(dead) > len(rows), generator=rng)
            self.counts[dead] = REVIVED * even
            self.sums[dead] = REVIVED * even * rows[places.to(rows.device)]
            self.vectors.weight.copy_(self.sums / self.counts[:, None])

    @torch.no_grad()
    def revive_unasked(self, moved: Moved, rng: torch.Generator) -> None:
        """The same by a generator of the GPU, which is not asked for a number: the step can be recorded."""
        dead, rows, even = moved.dead, moved.rows, len(moved.rows) / self.size
        away = (rows - moved.before[moved.codes]).square().sum(1) + 1e-12
        # the largest of these are draws without replacement, each row as likely as it is far away
        race = away / torch.empty_like(away).exponential_(generator=rng)
        places = race.topk(min(self.size, len(rows))).indices
        turn = (dead.cumsum(0) - 1).clamp(min=0) % len(places)
        self.counts.masked_fill_(dead, REVIVED * even)
        self.sums.copy_(torch.where(dead[:, None], REVIVED * even * rows[places[turn]], self.sums))
        self.vectors.weight.copy_(self.sums / self.counts[:, None])


# --- layers ---------------------------------------------------------------------------------------


class Residual(nn.Module):
    """x plus a 3x3 and a 1x1 convolution of it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.relu1 = nn.ReLU()
        self.conv1 = nn.Conv2d(channels, channels // 2, 3, padding=1)
        self.relu2 = nn.ReLU()
        self.conv2 = nn.Conv2d(channels // 2, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(self.relu2(self.conv1(self.relu1(x))))


def residuals(inputs: int, channels: int, blocks: int) -> list[nn.Module]:
    first = nn.Conv2d(inputs, channels, 3, padding=1)
    return [first, *(Residual(channels) for _ in range(blocks)), nn.ReLU()]


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


class Pass(NamedTuple):
    """What one pass of images [B, C, H, W] through the autoencoder gives."""

    images: Tensor  #: the reconstruction, [B, C, H, W]
    top: Quantised
    bottom: Quantised


class Autoencoder(nn.Module):
    """Images float [B, C, size, size] in [0, 1] to a `Pass`.

    The bottom level has a code for `cell` x `cell` pixels, the top level one for twice as many along a side. Other
    sizes than multiples of that are padded inside with copies of the border, and cropped back.
    """

    def __init__(self, settings: "VQVAE2", channels: int, size: int) -> None:
        super().__init__()
        width, blocks, code_width, cell = settings.width, settings.blocks, settings.code_width, settings.cell
        self.size, self.ratio = size, 2 * cell
        #: codes of the top level along a side; the bottom level has twice as many
        self.grid = -(-size // self.ratio)
        self.encode_bottom = nn.Sequential(*down(channels, width, cell), *residuals(width, width, blocks))
        self.encode_top = nn.Sequential(*halve(width, width), *residuals(width, width, blocks))
        self.to_top = nn.Conv2d(width, code_width, 1)
        self.top_codebook = Codebook(settings.top_codes, code_width, settings.codebook)
        self.decode_top = nn.Sequential(*residuals(code_width, width, blocks), *double(width, code_width))
        self.to_bottom = nn.Conv2d(width + code_width, code_width, 1)
        self.bottom_codebook = Codebook(settings.bottom_codes, code_width, settings.codebook)
        self.lift_top = nn.Sequential(*double(code_width, code_width))
        self.decode_bottom = nn.Sequential(*residuals(2 * code_width, width, blocks), *up(width, channels, cell))

    def forward(self, images: Tensor) -> Pass:
        top, bottom = self.quantised(images)
        return Pass(self.decode(top.vectors, bottom.vectors), top, bottom)

    def quantised(self, images: Tensor) -> tuple[Quantised, Quantised]:
        """Latents and what stands for them: of the top level, then of the bottom level, which sees the top's codes."""
        missing = self.grid * self.ratio - self.size
        padded = F.pad(images, (0, missing, 0, missing), mode="replicate") if missing else images
        coarse = self.encode_bottom(padded * 2 - 1)
        top = self.top_codebook(self.to_top(self.encode_top(coarse)))
        joined = torch.cat([coarse, self.decode_top(top.vectors)], 1)
        return top, self.bottom_codebook(self.to_bottom(joined))

    def decode(self, top: Tensor, bottom: Tensor) -> Tensor:
        """The images of vectors [B, D, g, g] and [B, D, 2g, 2g]."""
        decoded = self.decode_bottom(torch.cat([self.lift_top(top), bottom], 1))
        return (decoded[..., : self.size, : self.size] + 1) / 2

    @torch.no_grad()
    def start(self, images: Tensor, rng: torch.Generator) -> None:
        """Put both codebooks where the latents of these images lie: the top one first, as the bottom follows it."""
        self.top_codebook.start(self(images).top.latents, rng)
        self.bottom_codebook.start(self(images).bottom.latents, rng)

    def move_codebooks(self, passed: Pass) -> list[Moved]:
        """A step of codebooks that learn by moving averages, as a GPU can record it; nothing for codebooks that learn
        by gradient. `revive_codes` ends it."""
        if self.top_codebook.learning == "gradient":
            return []
        return [self.top_codebook.move(passed.top), self.bottom_codebook.move(passed.bottom)]

    def revive_codes(self, moved: Sequence[Moved], rng: torch.Generator) -> None:
        """New places for dead codes. With a generator of the GPU it can be recorded, too."""
        for book, one in zip((self.top_codebook, self.bottom_codebook), moved, strict=False):
            if rng.device.type == "cuda":
                book.revive_unasked(one, rng)
            else:
                book.revive(one, rng)


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
