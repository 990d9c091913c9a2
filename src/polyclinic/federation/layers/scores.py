"""Layers of scores: they leave a deployed site in coarse steps, none of training images, test scores of one model.

Statistics are finer than coarse scores. A coordinator that had one model scored and statistics of another one told
would learn from the difference of the two.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from polyclinic.federation.call import GateRefused
from polyclinic.federation.layers.interface import Layer
from polyclinic.federation.ledger.appended import Notes
from polyclinic.federation.ledger.budget import SCORES
from polyclinic.federation.ledger.kinds import PUBLIC
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import signature_of
from polyclinic.federation.policy import Policy
from polyclinic.federation.transaction import Parcels, Transaction

if TYPE_CHECKING:
    from polyclinic.federation.call import Call
    from polyclinic.federation.site import Site


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


#: in a deployed site's folder; no coordinator can put it back
TESTED = "tested.json"
STATISTICS = "statistics"


class ScoredOnce(Layer):
    """Figures of test images are about one model."""

    def arriving(self, transaction: Transaction) -> None:
        ScoredModel(transaction).check(transaction.call)

    def left(self, transaction: Transaction) -> None:
        if transaction.made:
            ScoredModel(transaction).note(transaction.call)


class ScoredModel(Notes):
    """Digests of the models that a site told figures of its test images about, by kind of parcel."""

    def __init__(self, transaction: Transaction) -> None:
        site, releases = transaction.site, transaction.declared.releases
        super().__init__(site.folder / TESTED)
        self._local = bool(site.trainer.local_names)
        kinds = [kind for kind in (SCORES, STATISTICS) if kind in releases]
        self._kind = kinds[0] if kinds and transaction.splits == ("test",) else None
        own = signature_of(transaction.work).parameters.get("own")
        self._own = "current" if own is None else str(own.default)  # where the call does not say

    def check(self, call: Call) -> None:
        """GateRefused where figures of the other kind were told about another model."""
        other = STATISTICS if self._kind == SCORES else SCORES
        told = self.read().get(other, []) if self._kind else []
        if told and self._model(call) not in told:
            raise GateRefused(
                f"'{call.operation}' came for another model than the one whose {other} of test images were told in "
                "this run; both are about the finished model"
            )

    def note(self, call: Call) -> None:
        """The site tells figures of this model."""
        if self._kind:
            self.add(self._kind, self._model(call))

    def _model(self, call: Call) -> str:
        """The weights that came, and which part of its own the site adds to them, where it has one."""
        digest = call.parcels["weights"].digest if "weights" in call.parcels else ""
        return f"{digest} {call.arguments.get('own', self._own) if self._local else 'none'}"


def was_scored(site: Site) -> bool:
    """Whether scores of the site's test images were told in this run, as they are when it is over."""
    return bool(Notes(site.folder / TESTED).read().get(SCORES))
