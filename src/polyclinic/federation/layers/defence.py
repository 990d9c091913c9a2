"""Layer of the `[defence]` table: what sites do to gradients and updates before these leave.

Weights are defended through their difference to the weights that the site was sent. (Two more defences have tables of
their own: clipping and noise are `[privacy]`, a deeper cut is `model.cut`. The secure sum is a defence, too: attack
`secure_sum` of what the sites would have sent.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyclinic.federation.layers.layer import Layer
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.settings import Settings

if TYPE_CHECKING:
    from polyclinic.federation.transaction import Parcels, Transaction

Gradients = Mapping[str, Tensor]


class Defended(Layer):
    """The study's defence changes what leaves."""

    def is_needed(self) -> bool:
        return self.spec.study.defence is not None

    def leaving(self, transaction: Transaction, parcels: Parcels) -> Parcels:
        defend = self.spec.study.defence
        assert defend
        return tuple(defend(parcel, transaction.received) for parcel in parcels)


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

    def applied(self, tensors: Gradients) -> dict[str, Tensor]:
        if self.name == "sparsify":
            return sparsify(tensors, keep=self.keep)
        if self.name == "prune":
            return prune(tensors, fraction=self.fraction)
        return quantise(tensors, bits=self.bits)

    def _on_difference(self, sent: Gradients, start: Gradients) -> dict[str, Tensor]:
        moved = {n: t - start[n].to(t) for n, t in sent.items() if n in start and t.is_floating_point()}
        defended = self.applied(moved)
        return {**sent, **{name: start[name].to(change) + change for name, change in defended.items()}}


def _with(parcel: Parcel, tensors: Gradients) -> Parcel:
    return Parcel(parcel.kind, tensors, parcel.metadata, parcel.privacy)


def sparsify(gradients: Gradients, *, keep: float) -> dict[str, Tensor]:
    """Only the share `keep` of all entries, the largest over all tensors together (top-k); the rest is 0."""
    sizes = torch.cat([tensor.abs().flatten() for tensor in gradients.values()])
    count = max(1, round(keep * sizes.numel()))
    mask = torch.zeros_like(sizes, dtype=torch.bool)
    mask[sizes.topk(count).indices] = True
    masks = mask.split([tensor.numel() for tensor in gradients.values()])
    pairs = zip(gradients.items(), masks, strict=True)
    return {name: torch.where(kept.view_as(tensor), tensor, 0) for (name, tensor), kept in pairs}


def prune(gradients: Gradients, *, fraction: float) -> dict[str, Tensor]:
    """In each tensor on its own, the share `fraction` of its smallest entries becomes 0."""
    pruned = {}
    for name, tensor in gradients.items():
        flat = tensor.flatten().clone()
        count = min(flat.numel() - 1, round(fraction * flat.numel()))
        flat[flat.abs().topk(count, largest=False).indices] = 0
        pruned[name] = flat.view_as(tensor)
    return pruned


def quantise(gradients: Gradients, *, bits: int = 8) -> dict[str, Tensor]:
    """Each tensor rounded to 2^bits - 1 even levels between plus and minus its largest entry."""
    levels = 2 ** (bits - 1) - 1
    rounded = {}
    for name, tensor in gradients.items():
        step = tensor.abs().amax() / levels
        rounded[name] = torch.where(step > 0, (tensor / step).round() * step, tensor)
    return rounded


def secure_sum(sent: Sequence[Gradients]) -> dict[str, Tensor]:
    """The mean of several sites' gradients: all that an attacker sees when only their sum is revealed.

    It is the gradient over all sites' images together, so attack it with as many images as all sites used.
    """
    return {name: torch.stack([gradients[name] for gradients in sent]).mean(0) for name in sent[0]}
