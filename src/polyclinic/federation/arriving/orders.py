"""What a site can see in weights alone, before it works with them: numbers, lengths and rows that no training makes.

Nothing here looks at the site's data, so an answer tells nothing about it and may be given openly. Every check is a
function from weights to sentences, one for each alarm; none is an empty list. Known attacks that change only the last
layer a little (fishing) pass these checks: those need the site's images. The bounds have not been measured over many
honest rounds yet, and no site calls these functions so far.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from polyclinic.federation.leaving.parcel import Expected, Parcel, ParcelRejected

Weights = Mapping[str, Tensor]

#: rows that are compared with all others of their layer at a time: bounds the memory
ROWS_AT_ONCE = 512


@dataclass(frozen=True)
class Bounds:
    """What still counts as usual. A factor of 10 is ten times as long, or a tenth."""

    largest: float = 1e6  #: of any single number
    length: float = 10.0  #: factor by which a tensor's norm may differ from the reference
    distance: float = 3.0  #: from the reference, in units of its norm
    parallel: float = 0.999  #: cosine from which two rows count as the same direction
    alike: float = 0.2  #: share of a layer's rows that may have the direction of another one
    empty: float = 0.2  #: share of a layer's rows that may be zero


def check_form(weights: Weights, reference: Weights) -> list[str]:
    """Names, dtypes and shapes as those of the reference."""
    try:
        Expected.like("weights", reference).check(Parcel("weights", weights))
    except ParcelRejected as refusal:
        return [str(refusal)]
    return []


def check_finite(weights: Weights, bounds: Bounds | None = None) -> list[str]:
    """No NaN, no infinity, and no number so large that a product of two overflows."""
    bounds = bounds or Bounds()
    alarms = []
    for name, tensor in _floating(weights).items():
        if not bool(tensor.isfinite().all()):
            alarms.append(f"'{name}' holds NaN or infinity")
        elif tensor.numel() and float(tensor.abs().max()) > bounds.largest:
            alarms.append(f"'{name}' holds {float(tensor.abs().max()):.1e}; {bounds.largest:.0e} is the bound")
    return alarms


def check_course(weights: Weights, reference: Weights, bounds: Bounds | None = None) -> list[str]:
    """Each tensor's length and its distance from the reference: what the site last saw, or the initial weights.

    Vectors (biases, norm layers) often begin at zero, so that only matrices and convolutions have a length to compare.
    """
    bounds = bounds or Bounds()
    alarms = []
    for name, tensor in _floating(weights).items():
        if name not in reference or tensor.dim() < 2:
            continue
        expected = float(reference[name].double().norm())
        if expected == 0:
            continue
        ratio = float(tensor.double().norm()) / expected
        if not 1 / bounds.length <= ratio <= bounds.length:
            alarms.append(f"'{name}' is {ratio:.3g} times as long as expected; {bounds.length:g} is the bound")
        away = float((tensor.double() - reference[name].double()).norm()) / expected
        if not away <= bounds.distance:
            alarms.append(f"'{name}' is {away:.3g} times its length away from the expected course")
    return alarms


def check_rows(weights: Weights, bounds: Bounds | None = None) -> list[str]:
    """Rows of matrices and kernels of convolutions that are zero, or have the direction of another one of the layer.

    Bins of an imprinted layer are the same row with other biases; opened convolutions are copies of a few kernels.
    A layer with fewer than 4 rows (a head of two classes) or fewer than 8 numbers a row is not looked at.
    """
    bounds = bounds or Bounds()
    alarms = []
    for name, tensor in _floating(weights).items():
        if tensor.dim() < 2 or len(tensor) < 4 or tensor[0].numel() < 8 or not bool(tensor.isfinite().all()):
            continue
        empty, alike = row_shares(tensor, bounds.parallel)
        if empty > bounds.empty:
            alarms.append(f"'{name}': {empty:.0%} of the rows are zero")
        if alike > bounds.alike:
            alarms.append(f"'{name}': {alike:.0%} of the rows have the direction of another row")
    return alarms


def row_shares(tensor: Tensor, parallel: float) -> tuple[float, float]:
    """Shares of the rows of a tensor [R, ...]: those that are zero, and those parallel to another one."""
    rows = tensor.detach().flatten(1).double()
    lengths = rows.norm(dim=1)
    alive = lengths > 1e-6 * lengths.max()
    directions = rows[alive] / lengths[alive, None]
    # a row is parallel to itself: two or more says that there is another one
    alike = sum(
        int((((some @ directions.T).abs() >= parallel).sum(1) > 1).sum()) for some in directions.split(ROWS_AT_ONCE)
    )
    return 1 - float(alive.double().mean()), alike / len(rows)


def inspect(weights: Weights, reference: Weights, bounds: Bounds | None = None) -> list[str]:
    """All alarms of the checks above; a wrong form alone is told alone."""
    return check_form(weights, reference) or [
        *check_finite(weights, bounds),
        *check_course(weights, reference, bounds),
        *check_rows(weights, bounds),
    ]


def _floating(weights: Weights) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights.items() if tensor.is_floating_point()}
