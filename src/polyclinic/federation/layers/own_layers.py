"""Layers that a site's own people add, in its kit: they may refuse, and never change what leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyclinic.federation.layers.layer import Layer

if TYPE_CHECKING:
    from polyclinic.federation.host import SiteHost
    from polyclinic.federation.transaction import Parcels, Transaction


class OwnLayers(Layer):
    """All that the site's people added, one after the other."""

    def __init__(self, host: SiteHost) -> None:
        super().__init__(host)
        self.own = [kind(host) for kind in (self.spec.kit.layers if self.spec.kit else ())]

    def is_needed(self) -> bool:
        return bool(self.own)

    def arriving(self, transaction: Transaction) -> None:
        for layer in self.own:
            layer.arriving(transaction)

    def leaving(self, transaction: Transaction, parcels: Parcels) -> Parcels:
        for layer in self.own:
            layer.leaving(transaction, parcels)
        return parcels

    def left(self, transaction: Transaction) -> None:
        for layer in self.own:
            layer.left(transaction)
