"""Layer: scores leave a deployed site in coarse steps, and none of training images does."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from polyclinic.federation.layers.layer import Layer
from polyclinic.federation.ledger.budget import SCORES
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.policy import Policy
from polyclinic.federation.privacy_coverage import PUBLIC

if TYPE_CHECKING:
    from polyclinic.federation.transaction import Parcels, Transaction


class CoarseScores(Layer):
    """No score of training images leaves, and others as the site's policy says."""

    def leaving(self, transaction: Transaction, parcels: Parcels) -> Parcels:
        return tuple(without_loss(coarse_scores(self.spec.policy, transaction, parcel)) for parcel in parcels)


def without_loss(parcel: Parcel) -> Parcel:
    """The parcel without its training loss, an exact score of training images that no method needs."""
    told = {name: value for name, value in parcel.metadata.items() if name != "loss"}
    return parcel if len(told) == len(parcel.metadata) else replace(parcel, metadata=told)


def coarse_scores(policy: Policy, transaction: Transaction, parcel: Parcel) -> Parcel:
    """Scores as a deployed site lets them out: none of training images, others as its policy says;
    anything else as it is."""
    splits = transaction.splits
    if parcel.kind != SCORES:
        return parcel
    if "train" in splits:
        parcel = held_out_only(parcel, splits)
    if policy.scores == "fine" or not parcel.tensors:
        return parcel
    trainer, least = transaction.site.trainer, max(policy.min_cohort, 1)
    return replace(parcel, tensors=trainer.task.coarse(dict(parcel.tensors), least, trainer.target))


def held_out_only(parcel: Parcel, splits: tuple[str, ...]) -> Parcel:
    """Scores without those of training images. Where an operation scores several splits, a score's name begins with its
    split, as `test_real` does; one whose name does not counts as one of training images."""
    known = tuple(f"{split}_" for split in splits if split != "train")
    tensors = {name: tensor for name, tensor in parcel.tensors.items() if name.startswith(known)}
    metadata = {name: value for name, value in parcel.metadata.items() if name in PUBLIC}
    return replace(parcel, tensors=tensors, metadata=metadata)
