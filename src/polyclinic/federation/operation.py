"""Operations: what a method may ask of a site, and the kinds of parcel that each one releases."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from polyclinic.federation.plan import Plan

#: taken as an argument: weights up to the study's cut, and not of all of the network
FRONT = "front"
Partner = Literal["coordinator", "sites", "simulator"]


class Operation(NamedTuple):
    """What a method declares of something it may ask of a site. What is not declared has the strictest meaning."""

    releases: tuple[str, ...]
    takes: Mapping[str, str]
    splits: tuple[str, ...]
    repeats: bool
    partner: Partner
    plan: type[Plan] | None
    address: str

    def kind_of(self, argument: str) -> str:
        """The kind of parcel that the operation takes as this argument."""
        kind = self.takes.get(argument, argument.replace("_", "-"))
        return "weights" if kind == FRONT else kind


def signature_of(work: Callable) -> inspect.Signature:
    """What an operation takes; looked up once, since every call asks for it."""
    return _signature(getattr(work, "__func__", work), hasattr(work, "__self__"))


@functools.cache
def _signature(function: Callable, is_bound: bool) -> inspect.Signature:
    found = inspect.signature(function)
    return found.replace(parameters=list(found.parameters.values())[1:]) if is_bound else found


def operation(
    *releases: str,
    takes: Mapping[str, str] | None = None,
    splits: tuple[str, ...] = ("train",),
    repeats: bool = False,
    partner: Partner = "coordinator",
    plan: type[Plan] | None = None,
    address: str | None = None,
) -> Callable:
    """Marks a function of a method as an operation that releases parcels of the named kinds.

    `takes`: the kinds of parcel that it takes, by argument, where an argument is not named like its kind ("front" for
    weights up to the study's cut); a deployed site refuses any other kind. `splits`: the site's images that its release
    is computed from, where no argument `split` says so; scores of training images never leave a deployed site.
    `repeats`: it may be asked several times a round, as the steps of split learning are; a deployed site does any other
    operation that releases something once a round. `partner`: who is at the other end. What is between sites comes
    sealed from another one, or leaves sealed for it, and the coordinator has none of it; what is for the simulator
    exists in simulation only.
    `plan`: the kind of plan that the function yields first (`plan.py`), where plans of several simulated sites may be
    carried out together (`engine.stacked`). `address`: what random draws are addressed by instead of the function's
    name, so that a function can be renamed and its draws stay the same.

    Answers that the coordinator needs the mean or the sum of only are named in the method's table `SUMMED`.
    """

    def mark(function: Callable) -> Callable:
        named = address or function.__name__
        declared = Operation(releases, dict(takes or {}), splits, repeats, partner, plan, named)
        function.operation = declared  # type: ignore[attr-defined]
        return function

    return mark
