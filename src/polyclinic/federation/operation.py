"""Operations: what a method may ask of a site, and the kinds of parcel that each one releases."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from polyclinic.federation.plan import Plan


class Operation(NamedTuple):
    """What a method declares of something it may ask of a site."""

    releases: tuple[str, ...]
    simulation_only: bool
    sealed_only: bool
    for_sites_only: bool
    scores: tuple[str, ...]
    plan: type[Plan] | None
    address: str
    repeats: bool
    begins_round: bool
    takes: Mapping[str, str]
    front: bool
    summed: str = ""
    secure_only: bool = False

    def kind_of(self, argument: str) -> str:
        """The kind of parcel that the operation takes as this argument."""
        return self.takes.get(argument, argument.replace("_", "-"))


def operations_of(owner: object) -> list[Operation]:
    """What an object declares of all its operations."""
    found = (getattr(getattr(owner, name, None), "operation", None) for name in dir(type(owner)))
    return [one for one in found if one is not None]


def signature_of(work: Callable) -> inspect.Signature:
    """What an operation takes; looked up once, since every call asks for it."""
    return _signature(getattr(work, "__func__", work), hasattr(work, "__self__"))


@functools.cache
def _signature(function: Callable, is_bound: bool) -> inspect.Signature:
    found = inspect.signature(function)
    return found.replace(parameters=list(found.parameters.values())[1:]) if is_bound else found


def operation(
    *releases: str,
    simulation_only: bool = False,
    sealed_only: bool = False,
    for_sites_only: bool = False,
    scores: tuple[str, ...] = (),
    plan: type[Plan] | None = None,
    address: str | None = None,
    repeats: bool = False,
    begins_round: bool = False,
    takes: Mapping[str, str] | None = None,
    front: bool = False,
    summed: Literal["", "mean", "sum"] = "",
    secure_only: bool = False,
) -> Callable:
    """Marks a function of a method as an operation that releases parcels of the named kinds.

    `sealed_only`: what it is given must come sealed from another site, not from the coordinator. `for_sites_only`: what
    it releases goes to another site, sealed; the coordinator cannot have it. `scores`: the splits of a site's images
    that its release is computed from, where that is not the training images and no argument `split` says so; metrics of
    training images leave a deployed site empty.
    `plan`: the kind of plan that the function yields first (`plan.py`), where plans of several simulated sites may be
    carried out together (`engine.stacked`). `address`: what random draws are addressed by instead of the function's
    name, so that a function can be renamed and its draws stay the same.
    `repeats`: it may be asked several times a round, as the steps of split learning are; a deployed site does any other
    operation that releases something once a round. `begins_round`: the weights that it is given are those that
    `evaluate` scored in the round before, which a deployed site checks. `takes`: the kinds of parcel that it takes, by
    argument, where an argument is not named like its kind; a deployed site refuses any other kind. `front`: the weights
    that it is given are those of the network up to the study's cut, and not of all of it. `summed`: the coordinator
    needs nothing of the sites' releases but their mean (weighted as `method.weighting` says) or their sum, so that they
    can be added up in whole numbers, or in secret (`federation.sum`); the method then gets one reply of all sites
    together. `secure_only`: a step of a secure sum, or an answer that only such a sum protects; sites refuse it in a
    study without them.
    """

    def mark(function: Callable) -> Callable:
        named = address or function.__name__
        function.operation = Operation(  # type: ignore[attr-defined]
            releases,
            simulation_only,
            sealed_only,
            for_sites_only,
            scores,
            plan,
            named,
            repeats,
            begins_round,
            dict(takes or {}),
            front,
            summed,
            secure_only,
        )
        return function

    return mark
