"""The attack that an audit runs on a parcel, the kinds of parcel that it fits, and the leaks that show its power."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from polyclinic.audits.views import Finding, NotTried, Planted, Seen, Truth


class Attack(ABC):
    """One subclass per attack; its first line is what `polyclinic list attacks` prints.

    An attack gets what the receiver of a parcel has (`seen`). The site's images (`truth`) are for scoring alone.
    """

    kinds: ClassVar[tuple[str, ...]]  #: kinds of parcel that it fits
    tests: ClassVar[int] = 1  #: how many chances it compares with the audit's level, for each parcel

    @abstractmethod
    def attack(self, seen: Seen, truth: Truth) -> list[Finding | NotTried]:
        """What was found in one parcel, or why it was not tried."""

    def planted(self, seen: Seen, truth: Truth) -> list[Planted]:
        """The weakest leaks that "withstood" would exclude, each planted in this parcel's own setting.

        Where the attack finds nothing, the audit runs it on these with the same budget. Only an attack that finds them
        may say "withstood"; one that plants none says "not tested". A planted leak is never an exact copy.
        """
        return []
