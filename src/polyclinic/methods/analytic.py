"""Analytic: a ridge head on frozen features, in closed form, from sums that the sites send once.

The head is the one that ridge regression finds on the images of all sites together, however they are spread: AFL (He
et al., CVPR 2025) and Fed3R (Fani et al., ICML 2024) for classification with one column a class, and the same for
regression. Their penalty is a setting; ours is found by generalised cross-validation (Golub et al. 1979), which needs
nothing but the sums.

With `worth` it also says what each site adds, by leave-one-out and by Shapley values: the value of a coalition of sites
is minus the mean squared error, on the validation images of all sites, of the head that the coalition's sums give.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from polyclinic.errors import BadInput
from polyclinic.federation.call import Failure
from polyclinic.federation.operation import AS_LARGE_AS_A_NETWORK
from polyclinic.json_types import JsonObject
from polyclinic.methods.shared.method import Federation, Parcel, ParcelRejected, Site, Traits, Weights, operation
from polyclinic.methods.shared.one_round import RESOLUTION, Moments, OneRound
from polyclinic.metrics.statistics.shapley import EXACT, Game, exact_shares, leave_one_out, sampled_shares
from polyclinic.randomness import seed_of

#: penalties that are tried, as shares of the mean variance of a feature times the number of images
PENALTIES = tuple(10.0 ** (step / 4) for step in range(-24, 9))
#: validation images of a site that are believed: so many times its training images, and so many more
MOST_HELD_OUT, MORE_HELD_OUT = 10, 100
#: more numbers than that are solved on the device: on a CPU it takes minutes
ON_CPU = 2048


class Analytic(OneRound):
    name: Literal["analytic"] = "analytic"
    penalty: float | None = Field(
        None,
        gt=0,
        description="lambda of ridge regression on features of unit variance, as a share of the number of images; "
        "found by generalised cross-validation if not given",
    )

    worth: bool = Field(
        False,
        description="also say what each site adds (leave-one-out and Shapley values): sites then send sums over their "
        "validation images, too; for open sums (federation.sum = 'float') only",
    )

    summary: ClassVar[str] = "one round: sites send sums of features of a public encoder, the head follows from them"
    traits: ClassVar[Traits] = replace(OneRound.traits, tasks=("classification", "regression"))

    def run(self, federation: Federation) -> Weights:
        state = federation.state(weights=federation.initial_weights())
        for _ in federation.rounds(self.rounds, state):
            each = self.collect_each(federation)
            sums = reduce(add, each.values())
            if self.worth:
                held_out = within_training(federation, each, self.collect_each(federation, "give_held_out_sums"))
                federation.report("worth", worth_from_sums(each, held_out, self.head_of))
            penalty, head = solve(sums, self.penalty, federation.trainer.device)
            federation.report("analytic", {"penalty": penalty, "images": sums.count, "numbers": sums.width})
            state.weights = self.linear_head(federation, head)
            federation.evaluate(state.weights)
        return state.weights

    def sum_obstacle(self) -> str | None:
        if self.worth:
            return (
                "federation.sum: the worth of a site (method.worth) needs the sums of coalitions, and two give a "
                "site's own sum away; set federation.sum = 'float', or method.worth = false"
            )
        return super().sum_obstacle()

    def head_of(self, sums: Moments) -> Tensor:
        """The head float64 [k + 1, T] that sums give: offset, then slopes."""
        return solve(sums, self.penalty)[1]

    @operation("statistics", splits=("validation",), most={"statistics": AS_LARGE_AS_A_NETWORK})
    def give_held_out_sums(self, site: Site) -> Parcel:
        """The same sums over the site's validation images, where the study asks what each site adds."""
        if not self.worth:
            raise ParcelRejected("sums over validation images are asked for, and the study has no method.worth")
        whole = site.data
        if not len(whole.validation):
            raise ParcelRejected("the site has no validation images, of which method.worth wants sums")
        site.data = replace(whole, train=whole.validation)
        try:
            return self.sums_at(site, "validation")
        finally:
            site.data = whole


def within_training(
    federation: Federation, train: dict[str, Moments], held_out: dict[str, Moments]
) -> dict[str, Moments]:
    """Sums over validation images without those of sites that say far more than they have training images: one site
    would decide what all are worth. They have failed."""
    many = {
        site: f"{sums.count} validation images beside {train[site].count} training images; at most {MOST_HELD_OUT} "
        f"times as many and {MORE_HELD_OUT} more are believed"
        for site, sums in held_out.items()
        if sums.count > MOST_HELD_OUT * train[site].count + MORE_HELD_OUT
    }
    federation.note_failures([Failure(site, "give_held_out_sums", reason) for site, reason in many.items()])
    return {site: sums for site, sums in held_out.items() if site not in many}


def solve(sums: Moments, penalty: float | None, device: torch.device | str = "cpu") -> tuple[float, Tensor]:
    """The penalty, and the head float64 [k + 1, T]: offset, then slopes. Ridge on features of unit variance."""
    count = sums.count
    matrix, cross, squares = (part.to(device if sums.width > ON_CPU else "cpu") for part in sums.in_units())
    mean, mean_target = matrix[0, 1:] / count, cross[0] / count
    spread = (matrix[1:, 1:] - count * torch.outer(mean, mean)) / count
    scale = spread.diag().clamp(min=0).sqrt()
    inverse = torch.where(scale > 4 * RESOLUTION, 1 / scale, 0.0)  # below that a feature is mostly rounding
    correlation = spread * torch.outer(inverse, inverse)
    covariance = (cross[1:] / count - torch.outer(mean, mean_target)) * inverse[:, None]
    variance = (squares / count - mean_target.square()).sum()
    values, vectors = torch.linalg.eigh(correlation)
    values = values.clamp(min=0)
    turned = vectors.T @ covariance
    chosen = penalty or best_penalty(values, turned, float(variance), count)
    slopes = (vectors @ (turned / (values + chosen)[:, None])) * inverse[:, None]
    offset = mean_target - mean @ slopes
    return chosen, torch.cat([offset[None], slopes]).cpu()


def best_penalty(values: Tensor, turned: Tensor, variance: float, count: int) -> float:
    """The penalty with the lowest generalised cross-validation score, (RSS / n) / (1 - degrees of freedom / n)^2.

    `values` [k] are the eigenvalues of the features' correlations, `turned` [k, T] the covariances of features and
    targets along their eigenvectors, `variance` that of the targets.
    """
    scores = {}
    for penalty in PENALTIES:
        shrunk = turned / (values + penalty)[:, None]
        residual = variance - 2 * float((shrunk * turned).sum()) + float((shrunk.square() * values[:, None]).sum())
        freedom = (float((values / (values + penalty)).sum()) + 1) / count
        if freedom < 0.99:  # beyond that the residual is rounding, and the quotient means nothing
            scores[penalty] = residual / (1 - freedom) ** 2
    return min(scores, key=lambda penalty: scores[penalty]) if scores else PENALTIES[-1]


# --- worth of a site, from open sums ------------------------------------------------------------------

#: random orders of sites where not all coalitions are looked at
ORDERS = 200
#: the head float64 [k + 1, T] that sums give, offset first
Solve = Callable[[Moments], Tensor]


def worth_from_sums(train: Mapping[str, Moments], held_out: Mapping[str, Moments], solve: Solve) -> JsonObject:
    """The worth of each site, from its sums over training images, and those of all over validation images."""
    if not any(sums.count for sums in held_out.values()):
        raise BadInput("data.validation: no site has validation images to score; set a share above 0")
    names = list(train)
    game = functools.cache(functools.partial(squared_error_value, train, reduce(add, held_out.values()), solve))
    value = "minus the mean squared error on the validation images of all sites"
    looked_at = f"all {2 ** len(names):,} coalitions" if len(names) <= EXACT else f"{ORDERS} random orders of the sites"
    return shares_of(names, game, value, f"exact, from the sites' sums; {looked_at}")


def squared_error_value(train: Mapping[str, Moments], held_out: Moments, solve: Solve, some: frozenset[str]) -> float:
    """Minus the mean squared error of the head that these sites' sums give, on the images that `held_out` is of."""
    matrix, cross, squares = held_out.in_units()
    head = torch.zeros_like(cross)  # without any site nothing is known, and zero is said
    if some:
        head = solve(reduce(add, (train[name] for name in sorted(some))))
    error = squares.sum() - 2 * (head * cross).sum() + (head * (matrix @ head)).sum()
    return -float(error) / held_out.count


def shares_of(names: Sequence[str], game: Game, value: str, how: str) -> JsonObject:
    """Leave-one-out and Shapley values of a game; sampled, with intervals, above ten sites."""
    sampled = len(names) > EXACT
    rng = np.random.default_rng(seed_of("worth", *names))
    found = sampled_shares(names, game, ORDERS, rng) if sampled else exact_shares(names, game)
    without = leave_one_out(names, game)
    rows = {
        name: {"leave_one_out": without[name], "shapley": share.value}
        | ({"low": share.low, "high": share.high} if sampled else {})
        for name, share in found.items()
    }
    return {"value": value, "how": how, "all": game(frozenset(names)), "none": game(frozenset()), "sites": rows}
