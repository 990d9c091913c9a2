"""A codebook: the nearest of K vectors stands for each latent vector. Learned by gradient or by moving averages."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

Learning = Literal["ema", "gradient"]

DECAY = 0.99  # of the moving averages
DEAD = 0.05  # a code is dead when it is chosen less often than this share of an even spread
REVIVED = 0.1  # the share a code starts with when it is moved: not much more, so that it soon moves again if unused


class Quantised(NamedTuple):
    """codes int64 [B, h, w]; vectors [B, D, h, w] with the gradient passed straight through to the latents;
    codebook and commitment losses [B] of each image, means over its latent numbers."""

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
    that chose them, which `learn` moves after each step."""

    counts: Tensor
    sums: Tensor

    def __init__(self, size: int, width: int, learning: Learning) -> None:
        super().__init__()
        self.learning = learning
        self.vectors = nn.Embedding(size, width)
        if learning == "ema":
            self.vectors.weight.requires_grad_(False)
            self.register_buffer("counts", torch.zeros(size))
            self.register_buffer("sums", torch.zeros(size, width))

    @property
    def size(self) -> int:
        return self.vectors.num_embeddings

    @property
    def started(self) -> bool:
        """Whether the running means have begun; a gradient codebook has none to begin."""
        return self.learning == "gradient" or bool(self.counts.any())

    def nearest(self, latents: Tensor) -> Tensor:
        """The code nearest to each latent vector: [B, D, h, w] -> int64 [B, h, w]."""
        with torch.autocast(latents.device.type, enabled=False):
            vectors = self.vectors.weight.detach().float()
            rows = latents.detach().float().movedim(1, -1)
            # |z - e|^2 less |z|^2, which is the same for every code
            return (vectors.square().sum(1) - 2 * rows @ vectors.T).argmin(-1)

    def lookup(self, codes: Tensor) -> Tensor:
        """The vectors of codes: [B, h, w] -> [B, D, h, w]."""
        return self.vectors(codes).movedim(-1, 1).contiguous()

    def forward(self, latents: Tensor) -> Quantised:
        latents = latents.float()
        codes = self.nearest(latents)
        vectors = self.vectors(codes).movedim(-1, 1)
        if not (latents.is_cuda and latents.is_contiguous(memory_format=torch.channels_last)):
            vectors = vectors.contiguous()  # else channels are last in them, too
        codebook = (latents.detach() - vectors).square().mean((1, 2, 3))
        commitment = (vectors.detach() - latents).square().mean((1, 2, 3))
        return Quantised(codes, latents + (vectors - latents).detach(), codebook, commitment)

    # --- learning without gradients ---------------------------------------------------------------

    @torch.no_grad()
    def start(self, latents: Tensor, rng: torch.Generator) -> None:
        """Put the codes where the first latents [B, D, h, w] lie, so that all of them have a chance of being chosen."""
        self.vectors.weight.copy_(draw_vectors(latents, self.size, rng))
        if self.learning == "ema":
            # from zero, the few codes chosen first would take all the weight and the others never come to life
            self.counts.fill_(1)
            self.sums.copy_(self.vectors.weight)

    @torch.no_grad()
    def learn(self, latents: Tensor, codes: Tensor, rng: torch.Generator) -> None:
        """One step of the moving averages, and new places for dead codes; nothing for a gradient codebook."""
        if self.learning == "ema":
            self.revive(self.move(latents, codes), rng)

    @torch.no_grad()
    def move(self, latents: Tensor, codes: Tensor) -> Moved:
        """One step of the moving averages; asks a GPU for no number, so that it can be recorded."""
        rows = latents.detach().float().movedim(1, -1).flatten(0, -2)
        counts, sums = sums_of_each(rows, codes.flatten(), self.size)
        self.counts.lerp_(counts, 1 - DECAY)
        self.sums.lerp_(sums, 1 - DECAY)
        before = self.vectors.weight.detach().clone()
        self.vectors.weight.copy_(self.sums / self.counts[:, None])
        return Moved(rows, codes.flatten(), before, self.counts < DEAD * len(rows) / self.size)

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


def suits_a_gpu(rows: Tensor) -> bool:
    """Whether to compute in the way that suits a GPU: the result is the same up to rounding."""
    return rows.is_cuda and not torch.are_deterministic_algorithms_enabled()


def sums_of_each(rows: Tensor, codes: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Of rows [n, D] and their codes [n]: how many rows each code has [size], and their sum [size, D].

    A product with one-hot rows: unlike scattered additions, the same every time on a GPU.
    """
    if suits_a_gpu(rows):
        return _sums_in_bf16(rows, codes, size)
    chosen = (codes[:, None] == torch.arange(size, device=rows.device)).to(rows.dtype)
    return chosen.sum(0), chosen.T @ rows


def _sums_in_bf16(rows: Tensor, codes: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """With half the memory and on tensor cores. Three numbers in bf16 have all 24 bits of one in fp32, and sums are
    in fp32."""
    chosen = torch.zeros(len(rows), size, dtype=torch.bfloat16, device=rows.device)
    chosen.scatter_(1, codes[:, None], 1.0)
    parts, left = [], rows
    for _ in range(3):
        parts.append(left.bfloat16())
        left = left - parts[-1].float()
    ones = torch.ones_like(chosen[:, :8])  # eight, since rows in memory should begin at a multiple of 16 bytes
    found = _product(chosen.T, torch.cat([*parts, ones], 1))
    width = rows.shape[1]
    return found[:, -1], found[:, : 3 * width].reshape(size, 3, width).sum(1)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Of matrices in bf16, in fp32."""
    return torch.mm(left, right, out_dtype=torch.float32) if left.is_cuda else left.float() @ right.float()


def draw_vectors(latents: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """`count` of the latent vectors [B, D, h, w] at random, [count, D]; each at most once while there are enough."""
    rows = latents.detach().float().movedim(1, -1).flatten(0, -2)
    order = torch.randperm(len(rows), generator=rng).repeat(-(-count // len(rows)))[:count]
    return rows[order.to(rows.device)]


def used_share(codes: Tensor, size: int) -> float:
    """Which share of `size` codes occurs at all in `codes`."""
    return len(codes.unique()) / size
