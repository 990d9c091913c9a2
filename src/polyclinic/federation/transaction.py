"""A transaction: one operation at one site, from the call that came to the parcels that leave."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from polyclinic.federation.call import AS_SENT, Call
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import SEALED, Parcel
from polyclinic.federation.operation import Operation, signature_of
from polyclinic.federation.site import Site, SiteState

Parcels = tuple[Parcel, ...]


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
        #: the site's state before anything changed in it, from when on a failure is undone
        self.before: SiteState | None = None

    def undo(self) -> None:
        """Put the site back to where it was."""
        if self.before is not None:
            self.site.state = self.before
            self.site.memory.clear()
            self.site.cache.clear()

    def refusal(self, error: BaseException) -> BaseException:
        """The error; where something is wrong with what another site sealed, it says so."""
        sealed = self.before is not None and any(parcel.kind == SEALED for parcel in self.call.parcels.values())
        if not sealed or not isinstance(error, ParcelRejected):
            return error
        return type(error)(f"{error}{AS_SENT}").with_traceback(error.__traceback__)

    def begin_work(self) -> Any:
        """What the operation returns, or a generator that yields its plans."""
        opened = {name: parcel.tensors for name, parcel in self.received.items()}
        return self.work(self.site, **{**opened, **self.call.arguments})

    @cached_property
    def splits(self) -> tuple[str, ...]:
        """The splits of the site's images that the operation's release is computed from."""
        asked = signature_of(self.work).parameters.get("split")
        if asked is not None:
            return (str(self.call.arguments.get("split", asked.default)),)
        return self.declared.splits
