"""Layer of the archive: parcels that left are kept at the site for an audit, where the study says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyclinic.federation.layers.layer import Layer
from polyclinic.federation.ledger.wire import ROUNDING

if TYPE_CHECKING:
    from polyclinic.federation.transaction import Transaction


class Archive(Layer):
    """Keeps what left, with what had come; nothing that was refused is kept."""

    alone = True

    def is_needed(self) -> bool:
        return self.spec.archive is not None

    def arriving(self, transaction: Transaction) -> None:
        assert self.spec.archive
        self.spec.archive.begins(transaction.site, transaction.received)

    def left(self, transaction: Transaction) -> None:
        assert self.spec.archive
        declared, wire = transaction.declared, self.spec.study.engine.wire
        kept = transaction.outgoing if wire in ROUNDING else transaction.made  # an attacker gets the rounded numbers
        left = transaction.outgoing if self.host.sums.covers(declared) or wire == "delta" else None
        self.spec.archive.released(transaction.site, transaction.call, kept, transaction.used, declared.address, left)
