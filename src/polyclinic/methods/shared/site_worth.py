"""Worth of a site from open sums: what each adds to a ridge head, by leave-one-out and by Shapley values.

The value of a coalition of sites is minus the mean squared error, on the validation images of all sites, of the head
that the coalition's sums give. It follows from sums over training images and over validation images, exactly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add

import numpy as np
import torch
from torch import Tensor

from polyclinic.errors import BadInput
from polyclinic.json_types import JsonObject
from polyclinic.methods.shared.moments import Moments
from polyclinic.metrics.statistics.shapley import EXACT, Game, exact_shares, leave_one_out, sampled_shares
from polyclinic.randomness import seed_of

#: random orders of sites where not all coalitions are looked at
ORDERS = 200
#: the head float64 [k + 1, T] that sums give, offset first
Solve = Callable[[Moments], Tensor]


def worth_from_sums(train: Mapping[str, Moments], held_out: Mapping[str, Moments], solve: Solve) -> JsonObject:
    """What each site adds, from its sums over training images, and those of all over validation images."""
    if not any(sums.count for sums in held_out.values()):
        raise BadInput("data.validation: no site has validation images to score; set a share above 0")
    names = list(train)
    game = functools.cache(functools.partial(squared_error_value, train, reduce(add, held_out.values()), solve))
    value = "minus the mean squared error on the validation images of all sites"
    return shares_of(names, game, value, f"exact, from the sites' sums; {_coalitions(len(names))}")


def _coalitions(sites: int) -> str:
    return f"all {2**sites:,} coalitions" if sites <= EXACT else f"{ORDERS} random orders of the sites"


def squared_error_value(train: Mapping[str, Moments], held_out: Moments, solve: Solve, some: frozenset[str]) -> float:
    """Minus the mean squared error of the head that these sites' sums give, on the images that `held_out` is of."""
    matrix, cross, squares = held_out.in_units()
    head = torch.zeros_like(cross)  # without any site nothing is known, and zero is said
    if some:
        head = solve(reduce(add, (train[name] for name in sorted(some))))
    error = squares.sum() - 2 * (head * cross).sum() + (head * (matrix @ head)).sum()
    return -float(error) / held_out.count


def shares_of(names: Sequence[str], game: Game, value: str, how: str, orders: int | None = None) -> JsonObject:
    """Leave-one-out and Shapley values of a game; sampled, with intervals, above ten sites or with `orders`."""
    sampled = orders is not None or len(names) > EXACT
    rng = np.random.default_rng(seed_of("worth", *names))
    found = sampled_shares(names, game, orders or ORDERS, rng) if sampled else exact_shares(names, game)
    without = leave_one_out(names, game)
    rows = {
        name: {"leave_one_out": without[name], "shapley": share.value}
        | ({"low": share.low, "high": share.high} if sampled else {})
        for name, share in found.items()
    }
    return {"value": value, "how": how, "all": game(frozenset(names)), "none": game(frozenset()), "sites": rows}
