"""Layers of the form in which numbers leave: whole numbers of a sum, fewer digits, or differences."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from polyclinic.federation.call import COORDINATOR, GateRefused, base_of
from polyclinic.federation.layers.interface import Layer
from polyclinic.federation.ledger.parcel import shortened
from polyclinic.federation.ledger.wire import ROUNDING
from polyclinic.federation.transaction import Parcels, Transaction

if TYPE_CHECKING:
    from polyclinic.federation.site import HostSpec


class HiddenSamples(Layer):
    """The number of images leaves in a sum only, where the site's policy hides it."""

    def is_needed(self) -> bool:
        return self.spec.policy.samples == "hide"

    def leaving(self, transaction: Transaction, parcels: Parcels) -> Parcels:
        operation, sums = transaction.call.operation, self.host.sums
        if operation in sums.covered:
            return parcels
        counts = sums.summed.get(operation) != "mean" or _weighting(self.spec) == "samples"
        return without_samples(operation, parcels, needed=counts)


class Sum(Layer):
    """What is added up leaves as whole numbers."""

    def is_needed(self) -> bool:
        return bool(self.host.sums.covered)

    def leaving(self, transaction: Transaction, parcels: Parcels) -> Parcels:
        call, sums = transaction.call, self.host.sums
        if call.operation not in sums.covered:
            return parcels
        return sums.outgoing(transaction.site, call, self.sites.gates[call.site], parcels, _weighting(self.spec))


def _weighting(spec: HostSpec) -> str:
    return getattr(spec.study.method, "weighting", "samples")


def without_samples(operation: str, parcels: Parcels, *, needed: bool) -> Parcels:
    """The parcels without the number of images; GateRefused where it is `needed`."""
    if not any("samples" in parcel.metadata for parcel in parcels):
        return parcels
    if needed:
        raise GateRefused(
            f"'{operation}' tells how many images it is of, and the site's policy hides that (samples); set "
            "federation.sum = 'secure', or method.weighting = 'uniform'"
        )
    return tuple(replace(p, metadata={n: v for n, v in p.metadata.items() if n != "samples"}) for p in parcels)


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
