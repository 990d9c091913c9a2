"""The interface of a layer: one concern around an operation at a site."""

import contextlib
import copy
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from polyclinic.federation.call import Call
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import Parcels, Transaction

if TYPE_CHECKING:
    from polyclinic.federation.host import SiteHost


class Layer:
    """One concern of the sites of one process. It sees what arrives, what leaves, and what has left. Whatever it raises
    refuses: the site's state is put back, and what comes after it in the lists is not done."""

    #: whether sites must work one by one where this layer is needed, so that nothing is stacked
    alone: ClassVar[bool] = False

    def __init__(self, host: "SiteHost") -> None:
        self.host, self.spec, self.sites = host, host.spec, host.sites

    def is_needed(self) -> bool:
        """Whether the study, or the site's policy, gives the layer anything to do."""
        return True

    def around(self, transaction: Transaction) -> contextlib.AbstractContextManager:
        """Held around the work, and until all is done."""
        return contextlib.nullcontext()

    def arriving(self, transaction: Transaction) -> None:
        """Look at a call before the work; writes nothing but notes of what is about to happen."""

    def leaving(self, transaction: Transaction, parcels: Parcels) -> Parcels:
        """What leaves instead of these parcels."""
        return parcels

    def left(self, transaction: Transaction) -> None:
        """Write down what has happened. It may be told again after a kill, and does the same then."""


class SiteLayer:
    """A layer that a site's own people add (`LAYERS` in a plug-in of their site.toml). It may refuse, and never change.

    GateRefused is told to the coordinator. What depends on images must not be told: any other exception in `leaving`
    suspends the study until a person at the site has looked. Parcels are copies.
    """

    def arriving(self, call: Call) -> None:
        """Look at a call, and at what came with it, opened, before any work."""

    def leaving(self, call: Call, parcels: Parcels) -> None:
        """Look at what the site made, before it becomes whole numbers, is rounded or sealed."""

    def left(self, call: Call, parcels: Parcels) -> None:
        """What is told here has left."""


class OwnLayers(Layer):
    """All layers that the site's people added, one after the other."""

    def __init__(self, host: "SiteHost") -> None:
        super().__init__(host)
        self.own = self.spec.kit.layers if self.spec.kit else ()

    def is_needed(self) -> bool:
        return bool(self.own)

    def arriving(self, transaction: Transaction) -> None:
        for layer in self.own:
            layer.arriving(_copied_call(transaction))

    def leaving(self, transaction: Transaction, parcels: Parcels) -> Parcels:
        for layer in self.own:
            layer.leaving(_copied_call(transaction), tuple(map(_copied, parcels)))
        return parcels

    def left(self, transaction: Transaction) -> None:
        for layer in self.own:
            layer.left(_copied_call(transaction), tuple(map(_copied, transaction.sent)))


def _copied_call(transaction: Transaction) -> Call:
    parcels = {name: _copied(parcel) for name, parcel in transaction.received.items()}
    return replace(transaction.call, parcels=parcels, arguments=copy.deepcopy(dict(transaction.call.arguments)))


def _copied(parcel: Parcel) -> Parcel:
    tensors = {name: tensor.detach().clone() for name, tensor in parcel.tensors.items()}
    metadata, privacy = copy.deepcopy((dict(parcel.metadata), parcel.privacy))
    return Parcel(parcel.kind, tensors, metadata, privacy)
