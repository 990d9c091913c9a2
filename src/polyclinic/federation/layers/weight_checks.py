"""Figures of what arrives, by itself: numbers and rows that no training makes, one image's share in a gradient.

Nothing here looks at the site's data, so an answer about numbers and rows tells nothing about it and may be given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polyclinic.federation.policy import Incoming

Weights = Mapping[str, Tensor]

#: fewest images of a batch in whose gradient one image's share tells something: of two, one often has most of it
FEWEST_IMAGES = 4
#: rows that are compared with all others of their layer at a time: bounds the memory
ROWS_AT_ONCE = 512
#: numbers to which a longer row is folded: comparing all pairs of rows takes a tenth of the time
FOLD = 256
#: cosine from which two rows count as the same direction: random rows of 8 numbers are far below, copies above
PARALLEL = 0.999
#: layers with fewer rows (a head of two classes), or fewer numbers in a row, are not looked at
FEWEST_ROWS, SHORTEST_ROW = 4, 8


class Figure(NamedTuple):
    """One figure of a check: an alarm if it is above its limit. `where` names the tensor or layer."""

    check: str
    where: str
    value: float
    limit: float

    @property
    def is_alarm(self) -> bool:
        return not self.value <= self.limit  # NaN is an alarm

    def __str__(self) -> str:
        return f"{self.check} of '{self.where}' is {self.value:.3g}, and {self.limit:.3g} is the limit"


def refuse(figures: Iterable[Figure], error: type[Exception], cure: str = "") -> None:
    """Raise the error with the first alarm, if there is one."""
    for figure in figures:
        if figure.is_alarm:
            raise error(f"incoming check: {figure}{cure}")


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


def lengths(found: Mapping[str, float], before: Mapping[str, float], limits: Incoming) -> Iterator[Figure]:
    """How many times as long gradients or generators are as the longest before."""
    for name, length in found.items():
        if before.get(name):
            yield Figure("longer", name, length / before[name], limits.longer)


def dominances(gradients: Weights, limits: Incoming) -> Iterator[Figure]:
    """The share of one image in gradients [N, ...] of a batch's activations."""
    for name, gradient in gradients.items():
        if gradient.dim() > 1 and len(gradient) >= FEWEST_IMAGES:
            each = gradient.float().flatten(1).norm(dim=1)
            yield Figure("dominance", name, float(each.max() / each.sum().clamp(min=1e-30)), limits.dominance)
