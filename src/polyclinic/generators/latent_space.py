"""Latent spaces of generators, for attacks to search in: points [N, D], and the images of points.

A generator offers its own as `GeneratorModel.latent_space()`.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class LatentSpace(Protocol):
    """Points [N, D] whose numbers have a spread of about one, and images of them."""

    labelled: bool  #: whether an image depends on a label besides its point

    def draw(self, count: int, rng: torch.Generator) -> Tensor:
        """Points as the generator would draw them, [count, D], on the CPU."""

    def images(self, points: Tensor, labels: Tensor | None) -> Tensor:
        """[N, C, H, W] in about [0, 1], differentiable with respect to the points; no noise of its own."""


class GaussianSpace:
    """The latents of a GAN: `generate(z [N, width], labels [N] or None)` gives images in [0, 1].

    For a generator with a mapping network (StyleGAN) give the synthesis network as `generate` and `draw`, which makes
    points of its intermediate space out of Gaussian ones [N, width]; noise maps must be fixed in `generate`.
    """

    def __init__(
        self,
        generate: Callable[[Tensor, Tensor | None], Tensor],
        width: int,
        draw: Callable[[Tensor], Tensor] | None = None,
        *,
        labelled: bool = False,
    ) -> None:
        self.generate, self.width, self.mapped, self.labelled = generate, width, draw, labelled

    def draw(self, count: int, rng: torch.Generator) -> Tensor:
        points = torch.randn(count, self.width, generator=rng)
        return points if self.mapped is None else self.mapped(points).detach().cpu()

    def images(self, points: Tensor, labels: Tensor | None) -> Tensor:
        return self.generate(points, labels)


class CodeSpace:
    """The codes of a decoder (VQ-VAE-2): a point holds a vector for each place, and each vector stands for the nearest
    code of its level's codebook; gradients pass through as if it were that code (straight through).

    `decode` takes for each level vectors [N, width, side, side] and gives images; `codebooks` [codes, width] and
    `sides` say what the levels look like. Codes have no label, so labels are not used.
    """

    labelled = False

    def __init__(
        self, decode: Callable[[Sequence[Tensor]], Tensor], codebooks: Sequence[Tensor], sides: Sequence[int]
    ) -> None:
        self.decode, self.sides = decode, tuple(sides)
        self.codebooks = [codes.detach() for codes in codebooks]
        # so that a step of one size means the same in every codebook
        self.spreads = [float(codes.std()) or 1.0 for codes in self.codebooks]

    def draw(self, count: int, rng: torch.Generator) -> Tensor:
        """Codes drawn evenly, each place by itself."""
        parts = []
        for codes, side, spread in zip(self.codebooks, self.sides, self.spreads, strict=True):
            which = torch.randint(len(codes), (count, side * side), generator=rng)
            parts.append(codes.cpu()[which].flatten(1) / spread)
        return torch.cat(parts, 1)

    def images(self, points: Tensor, labels: Tensor | None) -> Tensor:
        return self.decode([self._vectors(level, part) for level, part in enumerate(self._parts(points))])

    def codes(self, points: Tensor) -> list[Tensor]:
        """The codes that points stand for, int64 [N, side, side] by level."""
        shapes = [(-1, side, side) for side in self.sides]
        parts = self._parts(points)
        return [self._nearest(level, part).reshape(shapes[level]) for level, part in enumerate(parts)]

    def _parts(self, points: Tensor) -> list[Tensor]:
        """[N, side², width] by level, in the codebooks' own units."""
        sizes = [codes.shape[1] * side**2 for codes, side in zip(self.codebooks, self.sides, strict=True)]
        parts = points.split(sizes, 1)
        widths = [codes.shape[1] for codes in self.codebooks]
        return [part.unflatten(1, (-1, w)) * s for part, w, s in zip(parts, widths, self.spreads, strict=True)]

    def _nearest(self, level: int, vectors: Tensor) -> Tensor:
        return torch.cdist(vectors.detach(), self.codebooks[level].to(vectors)).argmin(-1)

    def _vectors(self, level: int, part: Tensor) -> Tensor:
        chosen = self.codebooks[level].to(part)[self._nearest(level, part)]
        through = part + (chosen - part).detach()
        side = self.sides[level]
        return through.transpose(1, 2).unflatten(2, (side, side))
