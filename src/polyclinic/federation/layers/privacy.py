"""Layers of differential privacy: what leaves was trained with it where the study wants that; noise has a transcript.

The transcript of calls to a deployed site is one hash in its state, from which the seeds of noise are derived. A
coordinator may put a site back to an earlier round and ask it anew. With the same noise under other weights it could
take the noise off by subtraction. So whatever a site's numbers depend on is in the digest: asked the same, a site draws
the same noise and tells nothing new; asked anything else, it draws other noise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from polyclinic.federation.call import GateRefused
from polyclinic.federation.layers.interface import Layer
from polyclinic.federation.ledger.budget import SCORES, tells_something
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.transaction import Parcels, Transaction

if TYPE_CHECKING:
    from polyclinic.data.parts import ImageSet
    from polyclinic.federation.call import Call
    from polyclinic.federation.site import Site, SiteState


class CoveredByPrivacy(Layer):
    """Updates have a record of differential privacy where the study wants one; all else too, where it wants all."""

    def is_needed(self) -> bool:
        trainers = (self.spec.trainer, *self.spec.trainers.values())
        return any(one is not None and one.privacy is not None for one in trainers)

    def leaving(self, transaction: Transaction, parcels: Parcels) -> Parcels:
        check_private(transaction.site, transaction.call.operation, parcels)
        return parcels


def check_private(site: Site, operation: str, released: Iterable[Parcel]) -> None:
    """LookupError if an operation releases updates trained without differential privacy where the study wants it."""
    privacy = site.trainer.privacy if site.trainer else None
    if privacy is None:
        return
    if privacy.cover == "all":
        check_all_covered(operation, released, noised=privacy.score_noise is not None)
    if "classifier" not in privacy.on:
        return
    for parcel in released:
        if parcel.kind in ("weights", "gradients") and parcel.privacy is None:
            raise LookupError(
                f"'{operation}' trained {parcel.kind} without differential privacy, which privacy.on = 'classifier' "
                "asks for; the method must train with local_training.train, or take 'classifier' out of its traits"
            )


def check_all_covered(operation: str, released: Iterable[Parcel], *, noised: bool = False) -> None:
    """GateRefused if a parcel is not covered by differential privacy, or holds scores that are not `noised`, where the
    study wants all covered."""
    for parcel in released:
        if (parcel.kind == SCORES and not noised) or (parcel.privacy is None and tells_something(parcel)):
            raise GateRefused(f"'{operation}' releases {parcel.kind} that nothing covers, and privacy.cover is 'all'")


NAME = "trail"


class Transcript(Layer):
    """The call enters the transcript before noise is drawn for it."""

    def arriving(self, transaction: Transaction) -> None:
        if transaction.site.trainer.privacy is not None:
            extend(transaction.site, self.spec.result_settings_json, transaction.call, transaction.received)


def extend(site: Site, result_settings_json: str, call: Call, received: Mapping[str, Parcel]) -> None:
    """Enter a call, with what came along (opened, where it was sealed). The
    settings are those of the study that results depend on."""
    asked = [call.operation, call.round, call.to, dict(call.arguments)]
    digests = {name: parcel.digest for name, parcel in received.items()}
    text = json.dumps(
        [transcript_of(site.state), result_settings_json, _images_of(site), asked, digests], sort_keys=True
    )
    digest = bytearray(hashlib.sha256(text.encode()).digest())
    site.state[NAME] = torch.frombuffer(digest, dtype=torch.uint8)


def transcript_of(state: SiteState) -> str:
    """The digest of all calls up to now; empty before the first one, and at a site that keeps no trail."""
    return state[NAME].numpy().tobytes().hex() if NAME in state else ""


def _images_of(site: Site) -> str:
    """A digest of the site's images and what is known of them: noise must not be the same for others."""
    if NAME not in site.cache:
        site.cache[NAME] = " ".join(_digest(one) for one in (site.data.train, site.data.validation, site.data.test))
    return str(site.cache[NAME])


def _digest(part: ImageSet) -> str:
    found = hashlib.blake2b(digest_size=32)
    for array in (part.images, part.labels, part.masks, part.cases):
        if array is not None:
            found.update(f"{array.dtype} {array.shape}".encode())
            found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()
