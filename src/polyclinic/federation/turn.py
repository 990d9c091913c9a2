"""A turn: one operation at one site, undone as a whole where anything in it fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from polyclinic.federation.call import Call
from polyclinic.federation.leaving.parcel import Parcel
from polyclinic.federation.site import Site
from polyclinic.federation.state import SiteState


class Turn:
    """An operation at a site. `undo` leaves the site as it was, as if its process had died: no half-made state (or NaN
    in it) may reach the next round."""

    def __init__(self, site: Site, call: Call, asked: str = "") -> None:
        """`asked`: a digest of the call and of the site's state before it, at a deployed site."""
        self.site, self.call, self.asked = site, call, asked
        #: what came with the call, opened
        self.parcels: Mapping[str, Parcel] = {}
        self.before, self.changed = dict(site.state), site.state.changed
        #: indices of the site's images in every batch that it took, where an archive wants them
        self.used: list[Tensor] = []

    @property
    def payload(self) -> dict[str, Any]:
        return {name: parcel.tensors for name, parcel in self.parcels.items()} | dict(self.call.arguments)

    def undo(self) -> None:
        self.site.state = SiteState(self.before)
        self.site.state.changed = self.changed
        self.site.memory.clear()
        self.site.cache.clear()


@contextlib.contextmanager
def undone_on_error(turns: Sequence[Turn]) -> Iterator[None]:
    """Undo these turns if what is inside fails."""
    try:
        yield
    except BaseException:
        for turn in turns:
            turn.undo()
        raise
