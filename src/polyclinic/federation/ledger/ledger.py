"""The ledger: an append-only, hash-chained, signed record of every parcel that left a site.

Each line names its predecessor's digest and has the site's signature, so a line that is changed, removed, inserted or
forged is found by `verify`. Lines missing at the end are found by the ledger's anchor: a deployed site keeps the heads
of its ledgers in a second place, outside the run folders, and works no more until a person has put back a ledger that
does not fit. Else its budgets would begin anew.

A run that was killed and resumed repeats the work after its last checkpoint and so sends the same bytes again;
a release that is already on record is not written twice, and the ledger of a resumed run equals that of an
undisturbed one.
"""

import hashlib
import json
import os
import secrets
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from polyclinic.federation.ledger.keys import (
    Anchor,
    Head,
    anchor_from_json,
    head_from_json,
    sign_line,
    signer_of_line,
    signing_public_key,
)
from polyclinic.files import append, atomic_write, make_folder_durable, sync_file, sync_folder
from polyclinic.json_types import JsonObject, parse_json

GENESIS = "0" * 64
#: what every line tells of what left: who can rewrite a chain can write anything into it
_TYPES = {"round": int, "operation": str, "kind": str, "bytes": int, "digest": str, "to": str}
_NONE: Counter[tuple] = Counter()
_sorted_json = json.JSONEncoder(sort_keys=True).encode


class Position(NamedTuple):
    """How far a ledger had come: number of lines, and the digest of the last one."""

    lines: int
    digest: str


class Ledger:
    """The ledger of one site, in one file of JSON lines."""

    def __init__(self, path: Path, signer: Ed25519PrivateKey | None = None, anchor: "AnchorFile | None" = None) -> None:
        """`signer` is the site's key; `anchor` is that of a deployed site, whose lines are on disk before a parcel
        leaves. LedgerBroken if the file is not what the chain and the anchor say."""
        self.path = path
        make_folder_durable(path.parent) if anchor else path.parent.mkdir(parents=True, exist_ok=True)
        self._signer, self._anchor = signer, anchor
        lines = self._known_lines()
        self._position = Position(len(lines), lines[-1]["digest_of_line"] if lines else GENESIS)
        self._signature: str = lines[-1].get("signature", "") if lines else ""
        self._digests = [line["digest_of_line"] for line in lines] if anchor else []
        #: releases of an interrupted attempt that have not come again yet, and all that left: by round and operation
        self._on_record: defaultdict[tuple, Counter[tuple]] = defaultdict(Counter)
        self._missing = 0
        self._times: defaultdict[tuple, Counter[tuple]] = defaultdict(Counter)
        #: the last round in which something was released; without what came after the position a site was put back to
        self.last_round = 0
        for line in lines:
            self._times[line["round"], line["operation"]][line["kind"], line["to"]] += 1
            self.last_round = max(self.last_round, line["round"])
        #: whether lines were written that nobody has brought to disk
        self.unsynced = False
        self.due: list[tuple[Future[str], JsonObject]] = []  #: lines of parcels whose digests are being computed
        if anchor:
            anchor.check(path, self._digests)

    @property
    def position(self) -> Position:
        self.settle()
        return self._position

    @property
    def head(self) -> Head | None:
        """How far the ledger has come, for others to keep; None while it is empty."""
        self.settle()
        return Head(*self._position, self._signature) if self._position.lines else None

    @property
    def confirmed(self) -> int:
        """Number of lines, without those of an interrupted attempt that have not been repeated yet."""
        self.settle()
        return self._position.lines - self._missing

    def expect_repeats_after(self, lines: int) -> None:
        """From now on, releases that equal a line after the first `lines` ones are on record already.

        `lines` is how many a checkpoint has seen; LedgerBroken if some of those are gone, which the chain of
        what is left could not show.
        """
        self.settle()
        if lines > self._position.lines:
            raise LedgerBroken(f"{self.path}: holds {self._position.lines} lines, its last checkpoint has seen {lines}")
        if lines < self._position.lines:
            known = verify(self.path)
            self._on_record.clear()
            for line in known[lines:]:
                self._on_record[line["round"], line["operation"]][_identity(line)] += 1
            self._missing = len(known) - lines
            self.last_round = max((line["round"] for line in known[:lines]), default=0)

    def has(self, round: int, operation: str, kind: str, digest: str, to: str) -> bool:
        """Whether a release repeats one on record, made by an interrupted attempt."""
        self.settle()
        return self._on_record.get((round, operation), _NONE)[kind, digest, to] > 0

    def may_repeat(self, round: int, operation: str) -> bool:
        """Whether an interrupted attempt has released something of this operation in this round."""
        return self._on_record.get((round, operation), _NONE).total() > 0

    def times(self, round: int, operation: str, to: str | None = None, kind: str | None = None) -> int:
        """How often an operation has released something in a round, to whomever if `to` does not say; parcels of
        several kinds at once are one time."""
        found: Counter[str] = Counter()
        for (of_kind, receiver), number in self._times.get((round, operation), _NONE).items():
            if to in (None, receiver) and kind in (None, of_kind):
                found[of_kind] += number
        return max(found.values(), default=0)

    def append(self, digest: str, *, salted: bool = False, **about: Any) -> None:
        """Write down one release: `round` (0 is before the first round), `operation`, `kind`, `bytes`, `to`, and where
        there is any, its record of `privacy`, the secure `sum` that it belongs to, by id and number of sites, and how
        its numbers travel (`wire`), if not exactly.

        `salted`: what left is a secret of site and receiver. The coordinator gets the ledger's head, by which it could
        else confirm a guess of the content.
        """
        self.settle()
        address = (about["round"], about["operation"])
        line: JsonObject = {"index": self._position.lines, "previous": self._position.digest}
        line |= {
            "round": about["round"],
            "operation": about["operation"],
            "kind": about["kind"],
            "bytes": about["bytes"],
        }
        line |= {"digest": digest, "to": about["to"], "privacy": about.get("privacy")}
        line |= {"sum": about["sum"]} if about.get("sum") else {}
        line |= {"wire": about["wire"]} if about.get("wire", "exact") != "exact" else {}
        self.last_round = max(self.last_round, line["round"])
        repeated = self._on_record.get(address, _NONE)
        if repeated[_identity(line)] > 0:
            repeated[_identity(line)] -= 1
            self._missing -= 1
            return
        if salted:
            line["salt"] = secrets.token_hex(16)
        line["digest_of_line"] = _digest_of(line)
        if self._signer:
            line["signature"] = sign_line(self._signer, line["digest_of_line"])
        # opened anew for each line: a thousand sites must not hold a thousand open files
        append(self.path, json.dumps(line).encode() + b"\n")
        self.unsynced = True
        self._position = Position(self._position.lines + 1, line["digest_of_line"])
        self._signature = line.get("signature", "")
        self._times[address][line["kind"], line["to"]] += 1
        if self._anchor:
            self._digests.append(line["digest_of_line"])

    def append_soon(self, digest: Future[str], **about: Any) -> None:
        """Write down a release of a simulated site when its digest is computed; see `append`. Whatever is asked of
        the ledger comes after that."""
        self.due.append((digest, about))

    def settle(self) -> None:
        """Write the lines that wait for digests."""
        due, self.due = self.due, []
        try:
            while due:
                digest, about = due[0]
                self.append(digest.result(), **about)
                del due[0]
        finally:
            self.due = due

    def commit(self) -> None:
        """At a deployed site: all lines are on disk, and the anchor has the head, when this returns. Called before a
        parcel leaves."""
        if self._anchor and self.head and self._anchor.head != self.head:
            sync_file(self.path)
            sync_folder(self.path.parent)
            self._anchor.keep(head=self.head)

    def take_anchor(self, anchor: Anchor) -> None:
        """Keep a counter-signed head; LedgerBroken if this ledger never had it."""
        assert self._anchor, "simulated sites have no second place"
        known = self._anchor.countersigned
        if known is None or anchor.lines > known.lines:
            check_head(anchor, self.path, self._digests, "the coordinator's counter-signature")
            self._anchor.keep(countersigned=anchor)

    def _known_lines(self) -> list[JsonObject]:
        """The lines; those of a simulated site are its own, by their signatures. A deployed site's key may have been
        rotated since: its ledger has an anchor.

        A machine that lost power can leave half a line at the end, which is dropped; nothing was sent for it.
        """
        if not self.path.exists():
            return []
        data = self.path.read_bytes()
        if not data.endswith(b"\n"):
            os.truncate(self.path, data.rfind(b"\n") + 1)  # in one step: a kill here must not cost the other lines
        lines = verify(self.path)
        if self._signer and not self._anchor:
            unsigned = sum("signature" not in line for line in lines)  # an older version wrote these
            verify(self.path, [signing_public_key(self._signer)], unsigned=unsigned)
        return lines


def verify(
    path: Path, keys: Sequence[bytes] | None = None, *, unsigned: int = 0, torn: bool = False
) -> list[JsonObject]:
    """The lines of a ledger, oldest first; LedgerBroken where the chain does not hold.

    `keys`: the public keys of the site, oldest first. Every line must then be signed by one of them, and no line by an
    older one than the line before it; but for the first `unsigned` lines, which an older version wrote.
    `torn`: the last line may be unfinished, as a loss of power leaves it; it does not count, as nothing left for it.
    """
    lines: list[JsonObject] = []
    previous, oldest, texts = GENESIS, 0, path.read_bytes().split(b"\n")
    if texts.pop() and not torn:
        raise LedgerBroken(f"{path}, line {len(texts) + 1}: is cut off before its end")
    for number, text in enumerate(texts, 1):
        line = _parsed(path, number, text)
        if line["previous"] != previous or line["index"] != number - 1:
            raise LedgerBroken(f"{path}, line {number}: does not follow the line before it")
        previous = line["digest_of_line"]
        if _digest_of(line) != previous or json.dumps(line).encode() != text:
            raise LedgerBroken(f"{path}, line {number}: was changed after it was written")
        if keys is not None and number > unsigned:
            if "signature" not in line:
                raise LedgerBroken(f"{path}, line {number}: is not signed")
            place = signer_of_line(keys[oldest:], line["digest_of_line"], line["signature"])
            if place is None:
                raise LedgerBroken(f"{path}, line {number}: is not signed by the site's key")
            oldest += place
        lines.append(line)
    return lines


def _parsed(path: Path, number: int, text: bytes) -> JsonObject:
    try:
        line = json.loads(text)
        _ = line["digest_of_line"], line["previous"], line["index"], line.get("signature")
        if not all(type(line[name]) is kind for name, kind in _TYPES.items()):
            raise TypeError("a value has another type")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise LedgerBroken(f"{path}, line {number}: not a ledger line") from error
    return line


def _digest_of(line: JsonObject) -> str:
    """SHA-256 of a line but for its digest and its signature."""
    content = dict(line)
    for name in ("digest_of_line", "signature"):
        content.pop(name, None)
    return hashlib.sha256(_sorted_json(content).encode()).hexdigest()


def _identity(line: JsonObject) -> tuple:
    """Two releases of an operation in a round with the same identity let the same bytes out, to the same receiver."""
    return (line["kind"], line["digest"], line["to"])


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
