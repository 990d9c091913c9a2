"""The epsilon that a study may spend by its own settings, counted from what its run has on record at the site.

A site's state knows what it spent, but the coordinator may put a run back to an earlier state, or to none. The ledger
is not put back.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from polyclinic.federation.leaving.budget import OverBudget, Price, Spent
from polyclinic.federation.leaving.ledger import verify
from polyclinic.federation.leaving.parcel import Parcel

#: a share of the target by which sums of floats may differ
ROUNDING = 1e-6


class EpsilonTarget:
    """What a run has spent of `privacy.target_epsilon` of its study, for one image."""

    def __init__(self, epsilon: float, ledger: Path, price: Price) -> None:
        """`ledger` is that of the run; `price` is what the site counts for a record."""
        self.epsilon = epsilon
        self._price = dataclasses.replace(price, accountants=("rdp", "prv"), images=1)
        self._spent = Spent()
        for line in verify(ledger, torn=True) if ledger.exists() else []:
            self.spend(line["privacy"])

    def check(self, parcels: Iterable[Parcel]) -> None:
        """OverBudget unless these parcels, none of which has left before, stay within the target together."""
        after = copy.copy(self._spent)
        for parcel in parcels:
            self._add(after, parcel.privacy)
        if after.epsilon > self.epsilon * (1 + ROUNDING):
            raise OverBudget(
                f"this run would have spent epsilon {after.epsilon:.4g}, and its study sets privacy.target_epsilon = "
                f"{self.epsilon:g}"
            )

    def spend(self, record: Mapping[str, Any] | None) -> None:
        """A parcel with this record is about to leave."""
        self._add(self._spent, record)

    def _add(self, spent: Spent, record: Mapping[str, Any] | None) -> None:
        if record is not None:
            spent.add("", 0, record, self._price(record))
