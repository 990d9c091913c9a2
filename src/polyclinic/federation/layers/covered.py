"""Layer: what leaves was trained with differential privacy, where the study wants that."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from polyclinic.federation.layers.layer import Layer
from polyclinic.federation.ledger.budget import SCORES, tells_something
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.refusals import GateRefused

if TYPE_CHECKING:
    from polyclinic.federation.site import Site
    from polyclinic.federation.transaction import Parcels, Transaction


class CoveredByPrivacy(Layer):
    """Updates have a record of differential privacy where the study wants one; all else too, where it wants all."""

    def is_needed(self) -> bool:
        trainers = (self.spec.trainer, *self.spec.trainers.values())
        return any(one is not None and one.privacy is not None for one in trainers)

    def leaving(self, transaction: Transaction, parcels: Parcels) -> Parcels:
        check_private(transaction.site, transaction.call.operation, parcels)
        return parcels


def check_private(site: Site, operation: str, released: Iterable[Parcel]) -> None:
    """LookupError if an operation releases updates trained without differential privacy where the study wants it."""
    privacy = site.trainer.privacy if site.trainer else None
    if privacy is None:
        return
    if privacy.cover == "all":
        check_all_covered(operation, released, noised=privacy.score_noise is not None)
    if "classifier" not in privacy.on:
        return
    for parcel in released:
        if parcel.kind in ("weights", "gradients") and parcel.privacy is None:
            raise LookupError(
                f"'{operation}' trained {parcel.kind} without differential privacy, which privacy.on = 'classifier' "
                "asks for; the method must train with local_training.train, or take 'classifier' out of its traits"
            )


def check_all_covered(operation: str, released: Iterable[Parcel], *, noised: bool = False) -> None:
    """GateRefused if a parcel is not covered by differential privacy, or holds scores that are not `noised`, where the
    study wants all covered."""
    for parcel in released:
        if (parcel.kind == SCORES and not noised) or (parcel.privacy is None and tells_something(parcel)):
            raise GateRefused(f"'{operation}' releases {parcel.kind} that nothing covers, and privacy.cover is 'all'")
