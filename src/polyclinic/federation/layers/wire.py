"""Layers of the wire: numbers travel with fewer digits, or as differences, where `engine.wire` says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyclinic.federation.call import COORDINATOR, base_of
from polyclinic.federation.layers.layer import Layer
from polyclinic.federation.ledger.parcel import shortened
from polyclinic.federation.ledger.wire import ROUNDING

if TYPE_CHECKING:
    from polyclinic.federation.transaction import Parcels, Transaction


class Rounding(Layer):
    """The parcels have the numbers that their receiver gets."""

    def is_needed(self) -> bool:
        return self.spec.study.engine.wire in ROUNDING

    def leaving(self, transaction: Transaction, parcels: Parcels) -> Parcels:
        for parcel in parcels:  # an image that is rounded is no longer found among the site's own
            self.sites.gates[transaction.call.site].check_numbers(parcel)
        return tuple(shortened(parcel, self.spec.study.engine.wire) for parcel in parcels)


class Difference(Layer):
    """What goes to the coordinator travels as a difference to the weights that came."""

    def is_needed(self) -> bool:
        return self.spec.study.engine.wire == "delta"

    def leaving(self, transaction: Transaction, parcels: Parcels) -> Parcels:
        if transaction.call.to != COORDINATOR:
            return parcels
        base = base_of(transaction.received)
        return tuple(shortened(parcel, "delta", base) for parcel in parcels)
