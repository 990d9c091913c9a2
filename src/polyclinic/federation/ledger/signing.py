"""Signatures of ledger lines (Ed25519): by the site, and counter-signatures of a ledger's head by the coordinator.

A deployed site keeps the heads of its ledgers in a second place, outside the run folders (`AnchorFile`): a ledger that
is emptied, deleted, cut short or replaced no longer fits its anchor, and the site works no more until a person has put
it back. Else its budgets would begin anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from polyclinic.files import atomic_write, make_folder_durable
from polyclinic.json_types import parse_json

LINE = b"polyclinic ledger line 1 "
ANCHOR = b"polyclinic ledger anchor 1 "


class Head(NamedTuple):
    """How far a ledger has come. `signature` is that of the last line; empty where lines are not signed."""

    lines: int
    digest: str
    signature: str = ""


class Anchor(NamedTuple):
    """A head with the coordinator's counter-signature; empty where there is none."""

    lines: int
    digest: str
    signature: str = ""
    countersignature: str = ""

    @property
    def head(self) -> Head:
        return Head(*self[:3])


def signing_public_key(key: Ed25519PrivateKey) -> bytes:
    """What others need to check signatures, 32 bytes."""
    return key.public_key().public_bytes_raw()


def sign_line(key: Ed25519PrivateKey, digest_of_line: str) -> str:
    """A site's signature of a line, as hex digits."""
    return key.sign(LINE + digest_of_line.encode()).hex()


def signer_of_line(keys: Sequence[bytes], digest_of_line: str, signature: object) -> int | None:
    """The place of the public key that signed a line; None if none of them did."""
    return _signer(keys, LINE + digest_of_line.encode(), signature)


def sign_anchor(key: Ed25519PrivateKey, run: str, site: str, head: Head) -> Anchor:
    """A head with the coordinator's counter-signature, for this run and site only."""
    return Anchor(*head, countersignature=key.sign(_anchor_text(run, site, head)).hex())


def is_countersigned(keys: Sequence[bytes], run: str, site: str, anchor: Anchor) -> bool:
    """Whether one of the coordinator's keys counter-signed this head of this site in this run."""
    return _signer(keys, _anchor_text(run, site, anchor.head), anchor.countersignature) is not None


def head_from_json(value: Any) -> Head:
    """A head that came from outside; ValueError if it is none."""
    return Head(*_checked(value, Head))


def anchor_from_json(value: Any) -> Anchor:
    """An anchor that came from outside; ValueError if it is none."""
    return Anchor(*_checked(value, Anchor))


def _checked(value: Any, wanted: type[Head] | type[Anchor]) -> Sequence[Any]:
    fits = isinstance(value, list | tuple) and len(value) == len(wanted._fields)
    if not fits or type(value[0]) is not int or value[0] < 1 or not all(isinstance(text, str) for text in value[1:]):
        raise ValueError("not the head of a ledger")
    return value


def _anchor_text(run: str, site: str, head: Head) -> bytes:
    return ANCHOR + json.dumps([run, site, head.lines, head.digest]).encode()


def _signer(keys: Sequence[bytes], message: bytes, signature: object) -> int | None:
    try:
        signed = bytes.fromhex(signature) if isinstance(signature, str) else b""
    except ValueError:
        return None
    if signed.hex() != signature:  # other letters for the same number: somebody changed the file
        return None
    for place, key in enumerate(keys):
        try:
            Ed25519PublicKey.from_public_bytes(key).verify(signed, message)
        except InvalidSignature:
            continue
        return place
    return None


class LedgerBroken(Exception):  # noqa: N818
    """A ledger that does not hold. Names the file and the line."""


class AnchorFile:
    """The anchor of one ledger: the head as the site last wrote it, and the last one that the coordinator signed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head: Head | None = None
        self.countersigned: Anchor | None = None
        if path.exists():
            self._read()

    def keep(self, head: Head | None = None, countersigned: Anchor | None = None) -> None:
        """Write down a head, a counter-signed one, or both; on disk when this returns."""
        self.head = head or self.head
        self.countersigned = countersigned or self.countersigned
        make_folder_durable(self.path.parent)
        content = {"head": self.head, "countersigned": self.countersigned}
        atomic_write(self.path, json.dumps(content) + "\n", private=True, durable=True)

    def check(self, ledger: Path, digests: Sequence[str]) -> None:
        """LedgerBroken unless a ledger with these digests of lines has all that the anchor has seen."""
        for head in (self.head, self.countersigned):
            if head is not None:
                check_head(head, ledger, digests, f"the anchor {self.path}")

    def _read(self) -> None:
        try:
            content: Mapping[str, Any] = parse_json(self.path.read_text(encoding="utf-8"))
            head, countersigned = content["head"], content["countersigned"]
            self.head = None if head is None else head_from_json(head)
            self.countersigned = None if countersigned is None else anchor_from_json(countersigned)
        except (ValueError, KeyError, TypeError) as error:
            raise LedgerBroken(f"{self.path}: is damaged; put it back from a backup") from error


def check_head(head: Head | Anchor, ledger: Path, digests: Sequence[str], witness: str) -> None:
    """LedgerBroken unless the ledger has come as far as this head; `witness` says who knows of it."""
    if len(digests) < head.lines:
        missing = "is missing" if digests else "is missing, the ledger is empty or gone"
        raise LedgerBroken(
            f"{ledger}, line {len(digests) + 1}: {missing}; {witness} says {head.lines} lines; "
            "put the ledger back from a backup"
        )
    if digests[head.lines - 1] != head.digest:
        raise LedgerBroken(f"{ledger}, line {head.lines}: is not the line that {witness} has seen")
