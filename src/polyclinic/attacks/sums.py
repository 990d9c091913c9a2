"""Attacks on sums: second moments of feature vectors (statistics parcels), and histograms of scores (metrics parcels).

Sums look harmless, and few images behind them are not hidden.

- *Second moments* X'X of n feature vectors in d dimensions, with n below d, tell the space that the vectors span: a
  candidate that lies in it was among them. With more vectors their *leverage* x'(X'X)^-1 x still tells: that of a
  vector among them is at most 1, and smaller than that of a new one. Leverage near 1 is an outlier. One vector alone is
  read off, up to its sign, and vectors whose supports do not meet as well. Two vectors are read off where their sum is
  known, too.
- *Histograms of scores* with many bins hold the scores of a small site one by one. Whoever has the network computes the
  score of a candidate, and looks whether its bin counts an image of its label; every further round is another look.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyclinic.errors import BadInput

RANK = 1e-6  #: eigenvalues below this share of the largest are rounding
OUTLIER = 0.9  #: leverage of a vector that has a direction of its own


def leverage(moments: Tensor, vectors: Tensor, penalty: float = 0.0) -> tuple[Tensor, Tensor]:
    """Leverage [M] of vectors [M, d] under second moments X'X [d, d], and the share [M] of each that lies outside the
    space that X spans (0 for a vector of X).

    `penalty`: a share of the largest eigenvalue that is added to all, where moments come with noise.
    """
    if moments.dim() != 2 or moments.shape[0] != moments.shape[1] or moments.shape[0] != vectors.shape[1]:
        raise BadInput(f"moments: {tuple(moments.shape)} is no square of the {vectors.shape[1]} features; give X'X")
    values, axes = torch.linalg.eigh(moments.double())
    known = values > RANK * values[-1].clamp(min=1e-300)
    along = vectors.double() @ axes
    inside = along[:, known].square() / (values[known] + penalty * values[-1])
    outside = along[:, ~known].square().sum(1) / along.square().sum(1).clamp(min=1e-300)
    return inside.sum(1), outside


def moment_scores(moments: Tensor, vectors: Tensor) -> Tensor:
    """Membership scores [M], higher where a vector is likely among those summed: first what lies outside of their
    space, then the leverage."""
    inside, outside = leverage(moments, vectors)
    return -(outside / (outside + RANK)) - 1e-3 * inside.clamp(max=1e3) / 1e3 - 0.1 * inside / (1 + inside)


def read_pair(total: Tensor, products: Tensor) -> Tensor:
    """The two vectors [2, d] behind their sum [d] and their second moments [d, d].

    What is left without the mean is half the square of their difference.
    """
    values, axes = torch.linalg.eigh(products.double() - torch.outer(total, total).double() / 2)
    apart = axes[:, -1] * (2 * values[-1].clamp(min=0)).sqrt()
    return torch.stack([total.double() + apart, total.double() - apart]) / 2


def bins_of(scores: Tensor, edges: Tensor) -> Tensor:
    """The bin [N] of each score [N]; `edges` [K - 1] ascend."""
    return torch.bucketize(scores.double().contiguous(), edges.double())


def histogram_scores(histograms: Sequence[Tensor], candidates: Sequence[Tensor], edges: Tensor) -> Tensor:
    """Membership scores [M] of candidates from histograms [K] of one label, a round each.

    `candidates`: their scores [M] in each round, by the network of that round. A candidate that falls into an empty bin
    in any round was not there: it scores the number of such rounds, negative. Ties go to rarer bins.
    """
    if len(histograms) != len(candidates) or not histograms:
        raise BadInput("histograms: give one for each round, with the candidates' scores of that round")
    total = torch.zeros(len(candidates[0]), dtype=torch.float64)
    for counts, scores in zip(histograms, candidates, strict=True):
        found = counts.double()[bins_of(scores, edges)]
        share = found / counts.double().sum().clamp(min=1)
        total += torch.where(found > 0, -share, -2.0)
    return total
