"""A site's budget of bytes and epsilon over all its runs, counted from its ledgers."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyclinic.federation.leaving.ledger import verify
from polyclinic.federation.leaving.parcel import Parcel
from polyclinic.federation.privacy_coverage import PUBLIC


class OverBudget(Exception):  # noqa: N818
    """A parcel that the site's budget does not cover; says which one."""


@dataclass
class Spent:
    """What ledger lines add up to.

    A record has what its run spent up to then. One that does not follow the record before it (it names another one, or
    has fewer steps) comes from a run that was put back: both then count, by plain addition, which may be more than they
    cost, and is never less.
    """

    bytes: int = 0
    closed: float = 0.0
    open: float = 0.0
    steps: int = 0
    trained: int | None = None

    @property
    def epsilon(self) -> float:
        return self.closed + self.open

    def add(self, size: int, record: Mapping[str, Any] | None) -> None:
        self.bytes += size
        if record is None:
            return
        if not self._follows(record):
            self.closed, self.open = self.closed + self.open, 0.0
        epsilon = math.inf if record["epsilon"] is None else record["epsilon"]
        self.open, self.steps, self.trained = max(self.open, epsilon), record["steps"], record.get("trained", 0)

    def _follows(self, record: Mapping[str, Any]) -> bool:
        """Whether a record is about the training of the record before it, or about what was made of that."""
        named = self.trained in (None, record.get("trained", 0), record.get("after", 0))
        return named and record["steps"] >= self.steps

    @classmethod
    def of(cls, ledger: Path) -> Spent:
        spent = cls()
        for line in verify(ledger) if ledger.exists() else []:
            spent.add(line["bytes"], line["privacy"])
        return spent


class Budget:
    """The most bytes and epsilon that may leave a site in all; None for no limit."""

    def __init__(
        self, ledger: Path, earlier: Sequence[Path] = (), *, bytes: int | None = None, epsilon: float | None = None
    ) -> None:
        """`ledger` is that of this run; `earlier` are those of the site's other runs."""
        self._bytes, self._epsilon = bytes, epsilon
        self._limited = bytes is not None or epsilon is not None
        self._here = Spent.of(ledger) if self._limited else Spent()
        self._earlier = [Spent.of(path) for path in earlier] if self._limited else []

    def check(self, parcels: Sequence[Parcel]) -> None:
        """OverBudget unless these parcels, none of which has left before, may leave together."""
        if not self._limited:
            return
        after = copy.copy(self._here)
        for parcel in parcels:
            after.add(len(parcel.encoded), parcel.privacy)
        size = after.bytes + sum(run.bytes for run in self._earlier)
        if self._bytes is not None and size > self._bytes:
            raise OverBudget(f"{size} bytes would have left this site, and its policy allows {self._bytes}")
        if self._epsilon is not None:
            self._check_epsilon(parcels, after.epsilon + sum(run.epsilon for run in self._earlier))

    def _check_epsilon(self, parcels: Sequence[Parcel], total: float) -> None:
        if any(parcel.privacy is None and _tells_something(parcel) for parcel in parcels):
            raise OverBudget("the site's policy has an epsilon budget, and differential privacy does not cover this")
        if total > self._epsilon:  # type: ignore[operator]
            raise OverBudget(f"epsilon {total:.4g} would be spent, and the site's policy allows {self._epsilon:g}")

    def spend(self, size: int, record: Mapping[str, Any] | None) -> None:
        """A parcel of this size has left."""
        self._here.add(size, record)


def _tells_something(parcel: Parcel) -> bool:
    """Whether a parcel holds more than sizes, which count as public."""
    return bool(parcel.tensors or parcel.metadata.keys() - PUBLIC)
