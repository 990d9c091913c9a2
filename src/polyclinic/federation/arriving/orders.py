"""What a site can see in weights alone, before it works with them: numbers and rows that no training makes.

Nothing here looks at the site's data, so an answer tells nothing about it and may be given openly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

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
    tensors = {name: tensor for name, tensor in floating(weights).items() if tensor.numel()}
    found = numbers([torch.stack(tensor.aminmax()).abs().max() for tensor in tensors.values()])
    for name, value in zip(tensors, found, strict=True):
        yield Figure("largest", name, value, limits.largest)


def rows(weights: Weights, limits: Incoming) -> Iterator[Figure]:
    """Rows of matrices and kernels of convolutions that are zero, or have the direction of another one of the layer.

    Bins of an imprinted layer are the same row with other biases; opened convolutions are copies of a few kernels.
    """
    tensors = {
        name: tensor
        for name, tensor in floating(weights).items()
        if tensor.dim() > 1 and len(tensor) >= FEWEST_ROWS and tensor.numel() >= SHORTEST_ROW * len(tensor)
    }
    counts = numbers([count for tensor in tensors.values() for count in row_counts(tensor)])
    for name, empty, alike in zip(tensors, counts[::2], counts[1::2], strict=True):
        yield Figure("empty", name, empty / len(tensors[name]), limits.empty)
        yield Figure("alike", name, alike / len(tensors[name]), limits.alike)


def row_counts(tensor: Tensor, parallel: float = PARALLEL) -> tuple[Tensor, Tensor]:
    """How many rows of a tensor [R, ...] are zero, and how many are parallel to another one."""
    found = folded(tensor.detach().flatten(1).float())
    lengths = found.norm(dim=1)
    empty = lengths < 1e-6 * lengths.max()  # a layer that is zero as a whole, as a head may begin, is not crafted
    directions = (found / lengths[:, None]).masked_fill(empty[:, None], 0.0)
    # a row is parallel to itself: two or more says that there is another one
    alike = [((some @ directions.T).abs() >= parallel).sum(1) > 1 for some in directions.split(ROWS_AT_ONCE)]
    return empty.sum(), torch.cat(alike).sum()


def folded(rows: Tensor) -> Tensor:
    """Long rows [R, n] added up in pieces of FOLD numbers with alternating signs: rows that are parallel stay so, and
    comparing all pairs takes a tenth of the time."""
    pieces = rows.shape[1] // FOLD
    if pieces < 2:
        return rows
    signs = (1 - 2 * (torch.arange(pieces) % 2)).to(rows)
    return torch.einsum("rpf,p->rf", rows[:, : pieces * FOLD].unflatten(1, (pieces, FOLD)), signs)


def numbers(scalars: Sequence[Tensor]) -> list[float]:
    """Scalars as numbers: a device is waited for once, and not for each."""
    return torch.stack([scalar.double() for scalar in scalars]).tolist() if scalars else []


def floating(weights: Weights) -> dict[str, Tensor]:
    """The tensors of floating-point numbers."""
    return {name: tensor for name, tensor in weights.items() if tensor.is_floating_point()}
