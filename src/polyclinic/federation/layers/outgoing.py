"""Layers of what is outgoing: whole numbers of a sum, fewer digits, or differences, as the study says."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from polyclinic.federation.call import COORDINATOR, base_of
from polyclinic.federation.layers.layer import Layer
from polyclinic.federation.ledger.parcel import shortened
from polyclinic.federation.ledger.wire import ROUNDING
from polyclinic.federation.policy import Policy
from polyclinic.federation.refusals import GateRefused

if TYPE_CHECKING:
    from polyclinic.federation.transaction import Parcels, Transaction


class Sum(Layer):
    """Steps of sums belong to the study's sums; what is added up leaves as whole numbers of one."""

    def arriving(self, transaction: Transaction) -> None:
        self.host.sums.check(transaction.call)

    def leaving(self, transaction: Transaction, parcels: Parcels) -> Parcels:
        call, sums = transaction.call, self.host.sums
        weighting = getattr(self.spec.method, "weighting", "samples")
        if sums.covers(call.operation):
            return sums.outgoing(transaction.site, call, self.sites.gates[call.site], parcels, weighting)
        counts = sums.summed.get(call.operation) != "mean" or weighting == "samples"
        return without_samples(self.spec.policy, call.operation, parcels, needed=counts)


def without_samples(policy: Policy, operation: str, parcels: Parcels, *, needed: bool) -> Parcels:
    """The parcels without the number of images, where the policy hides it; GateRefused where it is `needed`."""
    if policy.samples == "tell" or not any("samples" in parcel.metadata for parcel in parcels):
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
