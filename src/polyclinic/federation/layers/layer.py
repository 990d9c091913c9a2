"""The interface of a layer, one concern around an operation at a site, and the transaction that passes through it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from polyclinic.federation.call import Call
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import Operation, signature_of
from polyclinic.federation.site import Site, SiteState
from polyclinic.files import atomic_write

if TYPE_CHECKING:
    from polyclinic.federation.host import SiteHost


class Layer:
    """One concern of the sites of one process. It sees what arrives, what leaves, and what has left. Whatever it raises
    refuses: the site's state is put back, and what comes after it in the lists is not done."""

    #: whether sites must work one by one where this layer is needed, so that nothing is stacked
    alone: ClassVar[bool] = False

    def __init__(self, host: SiteHost) -> None:
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


Parcels = tuple[Parcel, ...]


class Notes:
    """Lists of texts by name, in a file of a deployed site that no coordinator puts back."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, list[str]]:
        return dict(json.loads(self.path.read_text(encoding="utf-8"))) if self.path.exists() else {}

    def add(self, name: str, text: str) -> None:
        """Note a text under a name, once; on disk when this returns."""
        known = self.read()
        if text not in known.setdefault(name, []):
            known[name].append(text)
            atomic_write(self.path, json.dumps(known), private=True, durable=True)


class Transaction:
    """A call to a site, what came with it, and what becomes of the answer on its way through the layers.

    The site is opened after the checks that need none of it (`OpenedSite`). `undo` leaves it as it was, as if its
    process had died: no half-made state (or NaN in it) may reach the next round.
    """

    site: Site

    def __init__(self, call: Call, work: Callable[..., Any], declared: Operation, group: Sequence[str] = ()) -> None:
        """`group`: the sites that do the operation at once, this one among them."""
        self.call, self.work, self.declared, self.group = call, work, declared, group
        #: what came with the call, opened
        self.received: dict[str, Parcel] = {}
        #: a digest of the call and of the site's state before it, at a deployed site
        self.asked = ""
        #: indices of the site's images in every batch that it took, where a layer wants them
        self.used: list[Tensor] = []
        #: what the operation made, what of it is to leave, and what left: each is the one before, changed by layers
        self.made: Parcels = ()
        self.outgoing: Parcels = ()
        self.sent: Parcels = ()
        #: what layers hold until all is done
        self.held = contextlib.ExitStack()
        self._before: Mapping[str, Tensor] | None = None

    def begin(self) -> None:
        """What changes at the site from now on is undone if anything fails."""
        self._before, self._changed = dict(self.site.state), self.site.state.changed

    def undo(self) -> None:
        """Put the site back to where it was."""
        if self._before is not None:
            self.site.state = SiteState(self._before)
            self.site.state.changed = self._changed
            self.site.memory.clear()
            self.site.cache.clear()

    @property
    def payload(self) -> dict[str, Any]:
        """What the operation is given by keyword."""
        return {name: parcel.tensors for name, parcel in self.received.items()} | dict(self.call.arguments)

    @cached_property
    def splits(self) -> tuple[str, ...]:
        """The splits of the site's images that the operation's release is computed from."""
        asked = signature_of(self.work).parameters.get("split")
        if asked is not None:
            return (str(self.call.arguments.get("split", asked.default)),)
        return self.declared.splits
