"""Agreement on who answered (the consistency check of Bonawitz et al. 2017): before a site gives a share, it wants the
signatures of as many members as open the sum under the same set of sites. So a coordinator cannot tell some sites that
one answered and others that it dropped out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from polyclinic.federation.leaving.parcel import ParcelRejected
from polyclinic.federation.summing.open_sum import OpenSum

if TYPE_CHECKING:
    from polyclinic.federation.leaving.key_ring import KeyRing
    from polyclinic.federation.site import Site

SIGNATURE_BYTES = 64


def signature_of(site: Site, found: OpenSum, answered: Iterable[str]) -> bytes:
    """The site's word that these sites answered the question that it was asked, in this sum."""
    return site.keys.signing_key(site.name).sign(_text(found, answered))


def check_agreement(site: Site, found: OpenSum, answered: Iterable[str], signatures: object) -> None:
    """ParcelRejected unless enough of the members signed that these sites answered."""
    text, given = _text(found, answered), signatures if isinstance(signatures, Mapping) else {}
    signed = sum(_is_signed(site.keys, name, text, given.get(name)) for name in found.members)
    if signed < found.threshold:
        raise ParcelRejected(
            f"{signed} of the {found.threshold} sites that are needed have signed who answered; the coordinator told "
            "sites different things, or some of them left"
        )


def _text(found: OpenSum, answered: Iterable[str]) -> bytes:
    agreed = json.dumps([found.context().sum_id, found.question, sorted(answered)])
    return b"polyclinic sum agreed 1 " + hashlib.sha256(agreed.encode()).digest()


def _is_signed(keys: KeyRing, name: str, text: bytes, signature: object) -> bool:
    try:
        signed = bytes.fromhex(signature) if isinstance(signature, str) else b""
    except ValueError:
        return False
    return any(_verifies(key, signed, text) for key in keys.verifying_keys(name))


def _verifies(key: bytes, signature: bytes, text: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True
