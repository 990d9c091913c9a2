"""The `[defence]` table of a study: what sites do to gradients and updates before these leave.

Weights are defended through their difference to the weights that the site was sent. (Two more defences have tables of
their own: clipping and noise are `[privacy]`, a deeper cut is `model.cut`.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field
from torch import Tensor

from polyclinic.federation.leaving import defences
from polyclinic.federation.leaving.parcel import Parcel
from polyclinic.settings import Settings

Tensors = Mapping[str, Tensor]


class Defence(Settings):
    """One defence. It costs accuracy and promises nothing: see what an audit says."""

    name: Literal["sparsify", "prune", "quantise"] = Field(
        description="sparsify: only the largest entries leave; prune: the smallest of each tensor become 0; quantise: "
        "entries are rounded to few levels"
    )
    keep: float = Field(0.1, gt=0, le=1, description="sparsify: share of all entries that leave")
    fraction: float = Field(0.9, ge=0, lt=1, description="prune: share of each tensor's entries that become 0")
    bits: int = Field(8, ge=2, le=16, description="quantise: bits of an entry")

    def __call__(self, parcel: Parcel, received: Mapping[str, Parcel]) -> Parcel:
        """The parcel that leaves instead: other kinds than gradients and weights leave as they are."""
        if parcel.kind == "gradients":
            return _with(parcel, self.applied(parcel.tensors))
        if parcel.kind == "weights" and "weights" in received:
            return _with(parcel, self._on_difference(parcel.tensors, received["weights"].tensors))
        return parcel

    def applied(self, tensors: Tensors) -> dict[str, Tensor]:
        if self.name == "sparsify":
            return defences.sparsify(tensors, keep=self.keep)
        if self.name == "prune":
            return defences.prune(tensors, fraction=self.fraction)
        return defences.quantise(tensors, bits=self.bits)

    def _on_difference(self, sent: Tensors, start: Tensors) -> dict[str, Tensor]:
        moved = {n: t - start[n].to(t) for n, t in sent.items() if n in start and t.is_floating_point()}
        defended = self.applied(moved)
        return {**sent, **{name: start[name].to(change) + change for name, change in defended.items()}}


def _with(parcel: Parcel, tensors: Tensors) -> Parcel:
    return Parcel(parcel.kind, tensors, parcel.metadata, parcel.privacy)
