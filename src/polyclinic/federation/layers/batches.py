"""Layers of the images behind an answer: which a site uses is noted, they have random shares in its gradients, and what
left is kept with them for an audit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from polyclinic.federation.layers.layer import Layer
from polyclinic.federation.ledger.wire import ROUNDING
from polyclinic.randomness import torch_rng

if TYPE_CHECKING:
    from polyclinic.federation.transaction import Transaction


class NotedBatches(Layer):
    """Indices of the images in every batch, for an archive and for the smallest cohort."""

    alone = True

    def is_needed(self) -> bool:
        return bool(self.spec.archive or self.spec.policy.min_cohort)

    def around(self, transaction: Transaction) -> contextlib.AbstractContextManager[None]:
        return _noted(transaction)


class RandomShares(Layer):
    """Random shares of images in gradients: others for every call, so that a run that is put back tells nothing more.
    Differential privacy bounds each image's share itself, and its proof wants no other image to change it."""

    alone = True

    def is_needed(self) -> bool:
        return self.spec.policy.shares == "random"

    def around(self, transaction: Transaction) -> contextlib.AbstractContextManager[None]:
        site = transaction.site
        if site.trainer.privacy is not None:
            return contextlib.nullcontext()
        return site.trainer.random_shares(
            torch_rng(*site.address("shares", site.round), site.secret, transaction.asked)
        )


@contextlib.contextmanager
def _noted(transaction: Transaction) -> Iterator[None]:
    with transaction.site.trainer.note_batches() as transaction.used:
        yield


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
        left = transaction.outgoing if self.host.sums.covers(transaction.call.operation) or wire == "delta" else None
        self.spec.archive.released(transaction.site, transaction.call, kept, transaction.used, declared.address, left)
