"""Figures of what arrives: numbers and rows that no training makes, and how far each row of a layer has moved since
weights last arrived; with what a site remembers for that. (`layers/incoming.py` says which attack each one stops.)

The first weights follow from the study's seed, so that a site knows them by itself. Later ones are compared with those
that arrived before. What is usual depends on the study: so a site also knows how far its own training moves a row.

Absence: one arrival may move weights as far as `at_once` rounds do. After a longer absence honest training may have
exchanged every row, and no distance tells it from crafted weights. Then the site takes the weights as the course, but
owes the rounds above `at_once`. Each later round with an arrival pays `at_once` rounds less those that the weights may
move by in it, and at least one round: a site that is drawn seldom would look on for ever. Only the first arrival of a
round moves the course. Until nothing is owed, the site looks at what arrives and releases nothing. So whatever a
coordinator pretends, no release is at weights farther away than `at_once` rounds for each round with an arrival, and
one more for each in which the site looked on.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from polyclinic.federation.policy import Incoming
from polyclinic.federation.site import SiteState

#: ends of the names of batch-norm statistics, which follow the images and not a gradient
STATISTICS = ("running_mean", "running_var")
#: the length of a vector that stands alone counts as no less than this for each of its numbers: biases begin at zero
LEAST = 0.1
#: a step of a site's own training counts as no longer than this: a study's learning rate must not make room for weights
#: that no training leads to. Honest first steps at the largest rates allowed are about as long
LONGEST_STEP = 0.11
#: a layer may move as if the site's training moved it by this share of how far it moved the layer that moved farthest:
#: which layers move in a round differs from one to the next. A quarter kept 3,000 honest rounds without an alarm
OTHER_LAYERS = 0.25


def layers(weights: "Weights") -> dict[str, Tensor]:
    """Rows [R, n] of every layer by its name: a unit's weights and its bias together; a lone vector is one row."""
    tensors = {name: t.float() for name, t in floating(weights).items() if not name.endswith(STATISTICS)}
    found = {}
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        bias = tensors.get(f"{layer}.bias") if kind == "weight" else None
        if kind == "bias" and _belongs(tensor, tensors.get(f"{layer}.weight")):
            continue
        own = tensor.flatten(1) if tensor.dim() > 1 else tensor[:, None] if kind == "weight" else tensor.reshape(1, -1)
        if bias is not None and _belongs(bias, own):
            own = torch.cat([own, bias[:, None]], 1)
        found[layer if kind == "weight" else name] = own
    return found


def _belongs(bias: Tensor, weight: Tensor | None) -> bool:
    return weight is not None and bias.dim() == 1 and len(bias) == len(weight)


def movement(weights: "Weights", reference: "Weights") -> dict[str, float]:
    """How far the row of each layer moved that moved farthest, in units of its length (or of the layer's mean one)."""
    common = {name: tensor for name, tensor in weights.items() if name in reference}
    before = layers({name: reference[name].to(tensor.device) for name, tensor in common.items()})
    found = {}
    for layer, now in layers(common).items():
        length = before[layer].norm(dim=1)
        alone = length.new_tensor(LEAST * before[layer].shape[1] ** 0.5)
        least = length.mean() if len(length) > 1 and bool(length.any()) else alone  # a layer may begin at zero
        found[layer] = ((now - before[layer]).norm(dim=1) / length.clamp(min=least)).max()
    return dict(zip(found, numbers(list(found.values())), strict=True))


def moved(
    found: Mapping[str, float], own: Mapping[str, float], limits: Incoming, how: str = "", *, rounds: int = 1
) -> "Iterator[Figure]":
    """The movement of each layer in so many `rounds` and what is allowed, by `own` movement in the site's training so
    far. `how` says what moves it, where that is not the weights themselves."""
    least = OTHER_LAYERS * max(own.values(), default=0.0)
    for layer, value in found.items():
        room = max(limits.moved, limits.times_own * max(own.get(layer, 0.0), least))
        yield Figure("moved", layer + how, value, rounds * room)


def counted(found: Mapping[str, float], steps: int) -> dict[str, float]:
    """The movement by so many steps of training, as far as it counts."""
    return {layer: min(value, LONGEST_STEP * max(steps, 1)) for layer, value in found.items()}


def stepped(weights: "Weights", gradients: "Weights", lr: float, *, by_sign: bool) -> dict[str, Tensor]:
    """The weights after a step along gradients; `by_sign`: every number moves by about lr, as in Adam."""
    return {
        name: weights[name].to(gradient) - (gradient.sign() if by_sign else gradient) * lr
        for name, gradient in gradients.items()
        if name in weights and weights[name].shape == gradient.shape
    }


class History:
    """What the check remembers of a study, in the site's state, so that a resumed run goes on from there: weights that
    arrived last, figures by name, and digests of what has passed."""

    GROUP = "incoming"

    def __init__(self, state: SiteState) -> None:
        self.state = state

    def last(self) -> dict[str, Tensor]:
        """The weights that arrived last; names that never arrived are missing."""
        return self.state.group(f"{self.GROUP}/last")

    def take(self, weights: Mapping[str, Tensor], round: int) -> None:
        """Remember weights that passed, and in which round, which never goes back. Half of the digits are enough to see
        how far others are away."""
        for name, tensor in floating(weights).items():
            self.state[f"{self.GROUP}/last/{name}"] = tensor.detach().bfloat16().cpu()
        self._keep("round/last", max(round, self.last_round()))

    def last_round(self) -> int:
        """The round in which weights arrived last; -1 where none did."""
        return int(self.most("round").get("last", -1))

    def rounds_since(self, round: int) -> int:
        """How many rounds the weights that arrived last are behind `round`, as its sender counts; at least one."""
        return max(1, round - self.last_round()) if self.most("round") else 1

    def owed(self) -> int:
        """Rounds that the site owes since it came back (see above); nothing leaves until they are paid."""
        return int(self.most("owed").get("rounds", 0))

    def returns(self) -> int:
        """How often the site came back by itself, as its state knows."""
        return int(self.most("owed").get("returns", 0))

    def take_owed(self, owed: int, *, returned: bool) -> None:
        """Remember what is owed now, and whether the site came back just now."""
        if owed != self.owed():
            self._keep("owed/rounds", owed)
        if returned:
            self._keep("owed/returns", self.returns() + 1)

    def own(self, lr: float) -> dict[str, float]:
        """How far the site's own training moved the rows of each layer, in proportion to the learning rate if that was
        larger than `lr`. It does not grow with the rate: a rate of next to nothing would make anything of rounding."""
        rates = self.most("rate")
        return {layer: value * min(1.0, lr / rates[layer]) for layer, value in self.most("own").items()}

    def take_movement(self, moved: Mapping[str, float], lr: float) -> None:
        """Remember how far the site's own training moved rows at a learning rate, where that is farther than before."""
        before = self.own(lr)
        for layer, value in moved.items():
            if value > before.get(layer, 0.0):
                self._keep(f"own/{layer}", float(value))
                self._keep(f"rate/{layer}", float(lr))

    def most(self, kind: str) -> dict[str, float]:
        """The largest figures of a kind so far, by name."""
        return {name: float(value) for name, value in self.state.group(f"{self.GROUP}/{kind}").items()}

    def take_most(self, kind: str, figures: Mapping[str, float]) -> None:
        """Keep figures that are larger than those before."""
        before = self.most(kind)
        for name, value in figures.items():
            if value > before.get(name, 0.0):
                self._keep(f"{kind}/{name}", float(value))

    def has_passed(self, digest: str, *, has_course: bool) -> bool:
        """Whether these very weights have been inspected before, as thoroughly."""
        kinds = ("passed",) if has_course else ("passed", "seen")
        return any(f"{self.GROUP}/{one}/{digest}" in self.state for one in kinds)

    def take_passed(self, digest: str, *, has_course: bool) -> None:
        self._keep(f"{'passed' if has_course else 'seen'}/{digest}", True)

    def _keep(self, name: str, value: float) -> None:
        dtype = torch.float64 if isinstance(value, float) else None
        self.state[f"{self.GROUP}/{name}"] = torch.tensor(value, dtype=dtype)


#: in a deployed site's folder: the digests of the weights with which it came back by itself, in a file that nobody puts
#: back: each time the coordinator learns whether they had moved farther than `at_once` rounds of the site's training
RETURNED = "returned.json"


def returned_with(folder: Path) -> list[str]:
    """What that file holds."""
    file = folder / RETURNED
    return list(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else []


def rounds_allowed(
    found: Mapping[str, float],
    own: Mapping[str, float],
    limits: Incoming,
    gap: int,
    *,
    may_return: Callable[[], bool],
) -> int:
    """The rounds whose movement weights may bring that arrive `gap` rounds after those before.

    As many as are needed by the plain limit: the site's own training, which nobody else knows, must not show in how
    long it looks on. More than `at_once` only where its own training does not explain the movement.
    """
    few, farthest = min(gap, limits.at_once), max(found.values(), default=0.0)
    if not math.isfinite(farthest):
        return few
    needed = max(1, math.ceil(farthest / limits.moved))
    enough = not any(figure.is_alarm for figure in moved(found, own, limits, rounds=few))
    return min(needed, few if enough or few == gap or not may_return() else gap)


def owed_after(owed: int, rounds: int, limits: Incoming) -> int:
    """The rounds that a site owes after another arrival, of weights that may move by so many rounds."""
    paid = limits.at_once - rounds
    return max(0, owed - (max(paid, 1) if owed and paid >= 0 else paid))


def looks_on(owed: int, limits: Incoming) -> str:
    """What a site that owes rounds says; nothing where it owes none. The number holds if weights move as in one round
    from each arrival to the next; where they move farther, it takes up to `at_once` - 1 times as long."""
    more = math.ceil(owed / (limits.at_once - 1))
    words = f"{more} more round{'s' if more > 1 else ''}, or longer"
    return f"incoming check: the site missed rounds and looks on for {words}" if owed else ""


Weights = Mapping[str, Tensor]

#: fewest images of a batch in whose gradient one image's share tells something: of two, one often has most of it
FEWEST_IN_BATCH = 4
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
        if gradient.dim() > 1 and len(gradient) >= FEWEST_IN_BATCH:
            each = gradient.float().flatten(1).norm(dim=1)
            yield Figure("dominance", name, float(each.max() / each.sum().clamp(min=1e-30)), limits.dominance)
