"""The ledger: an append-only, hash-chained record of every parcel that left a site.

Each line names its predecessor's digest, so a line that is changed, removed or inserted is found by `verify`.
A run that was killed and resumed repeats the work after its last checkpoint and so sends the same bytes again;
a release that is already on record is not written twice, and the ledger of a resumed run equals that of an
undisturbed one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from polyclinic.json_types import JsonObject

GENESIS = "0" * 64


class LedgerBroken(Exception):  # noqa: N818
    """The chain of a ledger does not hold. Names the file and the line."""


class Position(NamedTuple):
    """How far a ledger had come: number of lines, and the digest of the last one."""

    lines: int
    digest: str


class Ledger:
    """The ledger of one site, in one file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._drop_torn_line()
        lines = verify(path) if path.exists() else []
        self._position = Position(len(lines), lines[-1]["digest_of_line"] if lines else GENESIS)
        self._on_record: Counter[tuple] = Counter()

    @property
    def position(self) -> Position:
        return self._position

    @property
    def confirmed(self) -> int:
        """Number of lines, without those of an interrupted attempt that have not been repeated yet."""
        return self._position.lines - self._on_record.total()

    def expect_repeats_after(self, lines: int) -> None:
        """From now on, releases that equal a line after the first `lines` ones are on record already.

        `lines` is how many a checkpoint has seen; LedgerBroken if some of those are gone, which the chain of
        what is left could not show.
        """
        if lines > self._position.lines:
            raise LedgerBroken(f"{self.path}: holds {self._position.lines} lines, its last checkpoint has seen {lines}")
        if lines < self._position.lines:
            self._on_record = Counter(_identity(line) for line in verify(self.path)[lines:])

    def has(self, round: int, operation: str, kind: str, digest: str, to: str) -> bool:
        """Whether a release repeats one on record, made by an interrupted attempt."""
        return self._on_record[round, operation, kind, digest, to] > 0

    def append(
        self,
        *,
        round: int,
        operation: str,
        kind: str,
        bytes: int,
        digest: str,
        to: str,
        privacy: JsonObject | None = None,
    ) -> None:
        """Write down one release. `round` 0 is what happens before the first round."""
        line = {
            "index": self._position.lines,
            "previous": self._position.digest,
            "round": round,
            "operation": operation,
            "kind": kind,
            "bytes": bytes,
            "digest": digest,
            "to": to,
            "privacy": privacy,
        }
        if self._on_record[_identity(line)] > 0:
            self._on_record[_identity(line)] -= 1
            return
        line["digest_of_line"] = _digest_of(line)
        # opened anew for each line: a thousand sites must not hold a thousand open files
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._position = Position(self._position.lines + 1, str(line["digest_of_line"]))

    def _drop_torn_line(self) -> None:
        """A machine that lost power can leave half a line at the end; nothing was sent for it."""
        if not self.path.exists():
            return
        data = self.path.read_bytes()
        if data and not data.endswith(b"\n"):
            os.truncate(self.path, data.rfind(b"\n") + 1)  # in one step: a kill here must not cost the other lines


def verify(path: Path) -> list[JsonObject]:
    """The lines of a ledger, oldest first; LedgerBroken where the chain does not hold."""
    lines: list[JsonObject] = []
    previous = GENESIS
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        try:
            line = json.loads(text)
            claimed, named, index = line.pop("digest_of_line"), line["previous"], line["index"]
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise LedgerBroken(f"{path}, line {number}: not a ledger line") from error
        if named != previous or index != number - 1:
            raise LedgerBroken(f"{path}, line {number}: does not follow the line before it")
        if _digest_of(line) != claimed:
            raise LedgerBroken(f"{path}, line {number}: was changed after it was written")
        previous = claimed
        lines.append({**line, "digest_of_line": claimed})
    return lines


def _digest_of(line: JsonObject) -> str:
    return hashlib.sha256(json.dumps(line, sort_keys=True).encode()).hexdigest()


def _identity(line: JsonObject) -> tuple:
    """Two releases with the same identity let the same bytes out, to the same receiver, in the same round."""
    return (line["round"], line["operation"], line["kind"], line["digest"], line["to"])
