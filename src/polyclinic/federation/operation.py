"""Operations: what a method may ask of a site, and the kinds of parcel that each one releases."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Operation(NamedTuple):
    """What a method declares of something it may ask of a site."""

    releases: tuple[str, ...]
    simulation_only: bool
    sealed_only: bool


def operation(*releases: str, simulation_only: bool = False, sealed_only: bool = False) -> Callable:
    """Marks a function of a method as an operation that releases parcels of the named kinds.

    `sealed_only`: what it is given must come sealed from another site, not from the coordinator.
    """

    def mark(function: Callable) -> Callable:
        function.operation = Operation(releases, simulation_only, sealed_only)  # type: ignore[attr-defined]
        return function

    return mark
