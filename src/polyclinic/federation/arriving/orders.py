"""What a site can see in weights alone, before it works with them: numbers and rows that no training makes.

Nothing here looks at the site's data, so an answer tells nothing about it and may be given openly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from polyclinic.federation.arriving.settings import Figure, Incoming

Weights = Mapping[str, Tensor]

#: rows that are compared with all others of their layer at a time: bounds the memory
ROWS_AT_ONCE = 512
#: numbers to which a longer row is folded
FOLD = 256
#: cosine from which two rows count as the same direction
PARALLEL = 0.999
#: layers with fewer rows (a head of two classes), or fewer numbers in a row, are not looked at
FEWEST_ROWS, SHORTEST_ROW = 4, 8


def largest(weights: Weights, limits: Incoming) -> Iterator[Figure]:
    """The largest number of each tensor: no NaN, no infinity, and none so large that a product of two overflows."""
    for name, tensor in floating(weights).items():
        if tensor.numel():
            yield Figure("largest", name, float(tensor.abs().max()), limits.largest)


def rows(weights: Weights, limits: Incoming) -> Iterator[Figure]:
    """Rows of matrices and kernels of convolutions that are zero, or have the direction of another one of the layer.

    Bins of an imprinted layer are the same row with other biases; opened convolutions are copies of a few kernels.
    """
    for name, tensor in floating(weights).items():
        if tensor.dim() < 2 or len(tensor) < FEWEST_ROWS or tensor[0].numel() < SHORTEST_ROW:
            continue
        empty, alike = row_shares(tensor)
        yield Figure("empty", name, empty, limits.empty)
        yield Figure("alike", name, alike, limits.alike)


def row_shares(tensor: Tensor, parallel: float = PARALLEL) -> tuple[float, float]:
    """Shares of the rows of a tensor [R, ...]: those that are zero, and those parallel to another one."""
    found = folded(tensor.detach().flatten(1).float())
    lengths = found.norm(dim=1)
    alive = lengths > 1e-6 * lengths.max()
    directions = found[alive] / lengths[alive, None]
    # a row is parallel to itself: two or more says that there is another one
    alike = sum(
        int((((some @ directions.T).abs() >= parallel).sum(1) > 1).sum()) for some in directions.split(ROWS_AT_ONCE)
    )
    return 1 - float(alive.float().mean()), alike / len(found)


def folded(rows: Tensor) -> Tensor:
    """Long rows [R, n] added up in pieces of FOLD numbers with alternating signs: rows that are parallel stay so, and
    comparing all pairs takes a tenth of the time."""
    pieces = rows.shape[1] // FOLD
    if pieces < 2:
        return rows
    signs = (1 - 2 * (torch.arange(pieces) % 2)).to(rows)
    return torch.einsum("rpf,p->rf", rows[:, : pieces * FOLD].unflatten(1, (pieces, FOLD)), signs)


def floating(weights: Weights) -> dict[str, Tensor]:
    """The tensors of floating-point numbers."""
    return {name: tensor for name, tensor in weights.items() if tensor.is_floating_point()}
