"""The prior of VQ-VAE-2: gated PixelCNNs (van den Oord et al. 2016) that draw codes, top, then bottom given top.

Instead of masking weights, the input is moved by one row or one column and every convolution looks only up or left.
So all layers are plain convolutions, which Opacus has per-sample gradients for, and sampling can go row by row and
column by column with everything seen so far kept: each position is computed once, not once for every later one.
Inputs of convolutions are contiguous, because Opacus (1.6) silently computes wrong gradients where they are not.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.generators.base import LabelEmbedding
from polyclinic.generators.vqvae2.autoencoder import Residual, double
from polyclinic.tasks import Target

if TYPE_CHECKING:
    from polyclinic.generators.vqvae2.model import VQVAE2


def gate(x: Tensor) -> Tensor:
    signal, door = x.chunk(2, 1)
    return torch.tanh(signal) * torch.sigmoid(door)


class CodeEmbedding(nn.Module):
    """Codes to features: a vector learned for each code, and what the codebook says about it.

    The codebook's vectors tell which codes look alike, and what is learned about one then holds for its neighbours:
    without them a prior of hundreds of codes learns slowly, and much by heart.
    """

    vectors: Tensor

    def __init__(self, size: int, code_width: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.own = nn.Embedding(size, width)
        nn.init.normal_(self.own.weight, std=0.1)
        self.look = nn.Linear(code_width, width)
        self.register_buffer("vectors", torch.zeros(size, code_width))

    def know(self, vectors: Tensor) -> None:
        """Take over a codebook's vectors, moved and scaled to be around zero and about one."""
        self.vectors.copy_((vectors - vectors.mean(0)) / vectors.std().clamp(min=1e-6))

    def forward(self, codes: Tensor) -> Tensor:
        """[B, ...] -> [B, ..., width]"""
        return self.own(codes) + self.look(self.vectors[codes])


class GatedLayer(nn.Module):
    """A vertical stack that sees all rows above, and a horizontal one that sees the row so far."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.vertical = nn.Conv2d(width, 2 * width, (2, 3))
        self.horizontal = nn.Conv2d(width, 2 * width, (1, 2))
        self.link = nn.Conv2d(2 * width, 2 * width, 1)
        self.condition = nn.Conv2d(width, 4 * width, 1)
        self.drop_above = nn.Dropout(dropout)
        self.drop_left = nn.Dropout(dropout)
        self.out = nn.Conv2d(width, width, 1)

    def forward(self, above: Tensor, left: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        above, link = self.look_up(F.pad(above, (0, 0, 1, 0)), condition)
        inner = self.horizontal(F.pad(left, (1, 0))) + link
        return above, left + self.out(self.drop_left(gate(inner)))

    def look_up(self, rows: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """The vertical stack, and what it tells the horizontal one, for all rows but the first of `rows`."""
        seen = self.vertical(F.pad(rows, (1, 1)))
        for_vertical, for_horizontal = self.condition(condition).chunk(2, 1)
        return rows[:, :, 1:] + self.drop_above(gate(seen + for_vertical)), self.link(seen) + for_horizontal

    def look_left(self, before: Tensor, here: Tensor, link: Tensor) -> Tensor:
        """The horizontal stack at one column: [B, width] of the column before and of this one, link [B, 2 width]."""
        weight = self.horizontal.weight.flatten(1)
        inner = F.linear(torch.stack([before, here], 2).flatten(1), weight, self.horizontal.bias) + link
        return here + F.linear(gate(inner), self.out.weight.flatten(1), self.out.bias)


class PixelCNN(nn.Module):
    """The distribution of one level's codes on a grid x grid square, given a condition [B, width, grid, grid]."""

    def __init__(self, size: int, code_width: int, grid: int, width: int, layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.grid = grid
        self.embed = CodeEmbedding(size, code_width, width)
        self.layers = nn.ModuleList(GatedLayer(width, dropout) for _ in range(layers))
        self.body = nn.Sequential(nn.ReLU(), nn.Conv2d(width, width, 1), nn.ReLU())
        self.guess = nn.Conv2d(width, code_width, 1)
        self.trust = nn.Conv2d(width, 1, 1)
        self.own = nn.Conv2d(width, size, 1)
        nn.init.normal_(self.own.weight, std=0.01)

    def forward(self, codes: Tensor, condition: Tensor) -> Tensor:
        """Logits [B, size, grid, grid]; those at a position depend on codes int64 [B, grid, grid] before it only."""
        embedded = self.embed(codes).movedim(-1, 1).contiguous()
        above = F.pad(embedded, (0, 0, 1, -1))
        left = F.pad(embedded, (1, -1))
        for layer in self.layers:
            above, left = layer(above, left, condition)
        return self.logits(left)

    def logits(self, features: Tensor) -> Tensor:
        """[B, width, h, w] -> [B, size, h, w]: the nearer a code's vector to the one guessed the likelier, by as much
        as the guess is trusted; and a share learned for each code."""
        h, vectors = self.body(features), self.embed.vectors
        nearness = 2 * torch.einsum("bdhw,kd->bkhw", self.guess(h), vectors) - vectors.square().sum(1)[:, None, None]
        return self.own(h) + F.softplus(self.trust(h)) * nearness

    def sample(self, condition: Tensor, uniform: Tensor, temperature: float = 1.0) -> Tensor:
        """Codes int64 [B, grid, grid], each drawn with its number of `uniform` [B, grid, grid] in [0, 1)."""
        codes = torch.zeros(uniform.shape, dtype=torch.long, device=condition.device)
        blank = condition.new_zeros(len(condition), self.embed.width, 1, self.grid)
        row, seen = blank, [blank] * len(self.layers)
        for y in range(self.grid):
            seen, links = self._row(row, seen, condition[:, :, y : y + 1])
            codes[:, y] = self._columns(links, uniform[:, y], temperature)
            row = self.embed(codes[:, y]).movedim(-1, 1)[:, :, None]
        return codes

    def _row(self, row: Tensor, seen: list[Tensor], condition: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The vertical stacks one row further: the rows every layer saw, to be kept, and the links to this row."""
        kept, links = [], []
        for layer, last in zip(self.layers, seen, strict=True):
            kept.append(row)
            row, link = layer.look_up(torch.cat([last, row], 2), condition)  # type: ignore[operator]
            links.append(link[:, :, 0])
        return kept, links

    def _columns(self, links: list[Tensor], uniform: Tensor, temperature: float) -> Tensor:
        """The codes of one row [B, grid], column by column."""
        blank = links[0].new_zeros(len(uniform), self.embed.width)
        here, before, codes = blank, [blank] * len(self.layers), []
        for x in range(self.grid):
            kept = []
            for layer, last, link in zip(self.layers, before, links, strict=True):
                kept.append(here)
                here = layer.look_left(last, here, link[:, :, x])  # type: ignore[operator]
            codes.append(draw(self.logits(here[:, :, None, None]).flatten(1) / temperature, uniform[:, x]))
            here, before = self.embed(codes[-1]), kept
        return torch.stack(codes, 1)


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """One index for each row of logits [B, K], by where `uniform` [B] falls in their cumulated probabilities."""
    edges = logits.softmax(1).cumsum(1)
    found = torch.searchsorted(edges, uniform[:, None].to(edges.dtype).contiguous(), right=True)[:, 0]
    return found.clamp(max=logits.shape[1] - 1)  # the last edge may round to a little below 1


class Conditioner(nn.Module):
    """Where a position lies and what the label is, as a map [B, width, grid, grid]."""

    def __init__(self, target: Target, grid: int, width: int) -> None:
        super().__init__()
        self.grid = grid
        self.label = LabelEmbedding(target, width)
        self.place = nn.Embedding(grid * grid, width)

    def forward(self, labels: Tensor) -> Tensor:
        # one row of places for each image, not one for all: per-sample gradients need the batch dimension
        places = torch.arange(self.grid**2, device=labels.device).expand(len(labels), -1)
        place = self.place(places).mT.unflatten(2, (self.grid, self.grid))
        return place.contiguous() + self.label(labels)[:, :, None, None]


class Prior(nn.Module):
    """Codes of both levels given labels: top int64 [B, grid, grid], bottom [B, 2 grid, 2 grid], labels [B]."""

    def __init__(self, settings: "VQVAE2", target: Target, grid: int) -> None:
        super().__init__()
        top_codes, bottom_codes, code_width = settings.top_codes, settings.bottom_codes, settings.code_width
        width, layers, dropout = settings.prior_width, settings.prior_layers, settings.prior_dropout
        self.top_condition = Conditioner(target, grid, width)
        self.top = PixelCNN(top_codes, code_width, grid, width, layers, dropout)
        self.bottom_condition = Conditioner(target, 2 * grid, width)
        self.embed_top = CodeEmbedding(top_codes, code_width, width)
        self.lift_top = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), Residual(width), nn.ReLU(), *double(width, width)
        )
        self.bottom = PixelCNN(bottom_codes, code_width, 2 * grid, width, layers, dropout)

    def know(self, top: Tensor, bottom: Tensor) -> None:
        """Take over the vectors of both codebooks, whose codes the prior is about to learn."""
        self.top.embed.know(top)
        self.embed_top.know(top)
        self.bottom.embed.know(bottom)

    def forward(self, top: Tensor, bottom: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of both levels."""
        return self.top(top, self.top_condition(labels)), self.bottom(bottom, self._below(top, labels))

    def sample(self, labels: Tensor, rng: torch.Generator, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Codes of both levels for every label. Numbers are drawn on the CPU, so the device does not change them."""
        grid = self.top.grid
        uniform = torch.rand(len(labels), 5 * grid * grid, generator=rng).to(labels.device)
        first, rest = uniform[:, : grid * grid], uniform[:, grid * grid :]
        top = self.top.sample(self.top_condition(labels), first.unflatten(1, (grid, grid)), temperature)
        below = self._below(top, labels)
        return top, self.bottom.sample(below, rest.unflatten(1, (2 * grid, 2 * grid)), temperature)

    def _below(self, top: Tensor, labels: Tensor) -> Tensor:
        """The condition of the bottom level: place, label, and the top codes around."""
        return self.bottom_condition(labels) + self.lift_top(self.embed_top(top).movedim(-1, 1).contiguous())


def negative_log_likelihoods(top: Tensor, bottom: Tensor, logits: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of each image, [B]: nats per code of the top level plus nats per code of the bottom level."""

    def per_code(found: Tensor, codes: Tensor) -> Tensor:
        return F.cross_entropy(found.float(), codes, reduction="none").mean((1, 2))

    return per_code(logits[0], top) + per_code(logits[1], bottom)
