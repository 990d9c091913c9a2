"""Anchor files: where a deployed site keeps the heads of its ledgers in a second place, outside the run folders.

A ledger that is emptied, deleted, cut short or replaced no longer fits its anchor, and the site works no more until a
person has put it back: else its budgets would begin anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyclinic.federation.leaving.signing import Anchor, Head, anchor_from_json, head_from_json
from polyclinic.files import atomic_write, make_folder_durable
from polyclinic.json_types import parse_json


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
