"""The interface of an engine: what carries calls to sites. Engines live in `polyclinic.engines`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from polyclinic.federation.call import Call, Failure, Reply
from polyclinic.federation.site import SitePosition


class Engine(Protocol):
    """Carries calls to sites. A failing site is a `Failure` in the answer, never an exception."""

    #: true where all sites live in one run folder, so that the runner may look into each
    simulation: bool

    def call(self, calls: list[Call]) -> Iterable[Reply | Failure]:
        """Answers in the order of the calls; calls to different sites may run at the same time.

        Sites may work while the answers are being taken, so that not all of them lie in memory at once.
        """

    def checkpoint(self) -> dict[str, SitePosition]:
        """Make the state of every site durable, and say where each stands."""

    def saved_positions(self) -> dict[str, SitePosition]:
        """Where the states of the sites that lie on disk stand; writes nothing."""
        return {}

    def prune(self, positions: dict[str, SitePosition]) -> None:
        """Forget older states of the sites: a checkpoint with these positions is durable."""

    def restore(self, positions: dict[str, SitePosition]) -> None:
        """Put every site back to where a checkpoint found it."""

    def close(self) -> None:
        """Free processes and files."""
