"""The attack that an audit runs on a parcel, and the kinds of parcel that it fits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from polyclinic.audits.views import Finding, NotTried, Seen, Truth


class Attack(ABC):
    """One subclass per attack; its first line is what `polyclinic list attacks` prints.

    An attack gets what the receiver of a parcel has (`seen`). The site's images (`truth`) are for scoring alone.
    """

    kinds: ClassVar[tuple[str, ...]]  #: kinds of parcel that it fits

    @abstractmethod
    def attack(self, seen: Seen, truth: Truth) -> list[Finding | NotTried]:
        """What was found in one parcel, or why it was not tried."""
