"""The heads of the sites' ledgers, as the coordinator has them: how far each has come, counter-signed.

At a deployed run the coordinator also writes down what it received, in `received.jsonl` of its run folder: a line for
each answer, which `polyclinic ledger verify` compares with the site's ledger.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyclinic.data.allowed_paths import COORDINATOR
from polyclinic.federation.call import Call, Reply
from polyclinic.federation.ledger.keys import Anchor, Head, KeyRing, anchor_from_json, sign_anchor, signer_of_line
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import SEALED, Parcel
from polyclinic.federation.ledger.verify import RECEIVED_FILE, read_received
from polyclinic.json_types import JsonObject


class Heads:
    """Of all sites of one run. A ledger that went back, or is another one now, is refused."""

    def __init__(self, folder: Path, keys: KeyRing | None = None) -> None:
        """`folder` is the coordinator's run folder; `keys` are the coordinator's in a deployed run, where heads must be
        signed by the sites, and are counter-signed."""
        self._folder, self._keys = folder, keys
        self._known: dict[str, Anchor] = {}
        self._soon: dict[str, Callable[[], Head | None]] = {}  # of simulated sites whose lines are being written
        if keys:
            end_torn_line(folder / RECEIVED_FILE)

    def anchor(self, site: str) -> Anchor | None:
        """What goes with the next call to a site: its last head, counter-signed; None in a simulation."""
        return self._known.get(site) if self._keys else None

    def receive(self, call: Call, reply: Reply) -> None:
        """Take the head that came with an answer; ParcelRejected if the ledger is not the one that was known."""
        if reply.head_soon:
            self._soon[reply.site] = reply.head_soon
            return
        self._settle(reply.site)
        head, known = reply.head, self._known.get(reply.site)
        if head is None:
            if known or (self._keys and reply.parcels):
                raise ParcelRejected("the answer came without the head of the site's ledger")
            return
        if known and (head.lines < known.lines or (head.lines == known.lines and head.digest != known.digest)):
            raise ParcelRejected(f"its ledger had {known.lines} lines, and is another one now, of {head.lines} lines")
        self._known[reply.site] = self._countersigned(reply.site, head)
        if self._keys:
            self._write(call, reply.parcels)

    def restore(self, plain: Mapping[str, Sequence[Any]]) -> None:
        """Take over what `plain` gave, and what came after that checkpoint."""
        self._known = {site: anchor_from_json(value) for site, value in plain.items()}
        for line in read_received(self._folder) if self._keys else []:
            anchor = anchor_from_json(line["head"])
            if line["site"] not in self._known or anchor.lines > self._known[line["site"]].lines:
                self._known[line["site"]] = anchor

    def plain(self) -> dict[str, Anchor]:
        """What a checkpoint keeps."""
        self._settle(*self._soon)
        return dict(self._known)

    def summary(self) -> JsonObject:
        """For the result: lines and last digest of each ledger, and the signatures of a deployed run."""
        self._settle(*self._soon)
        return {site: {name: value for name, value in a._asdict().items() if value} for site, a in self._known.items()}

    def _settle(self, *sites: str) -> None:
        """Take the heads that were still to come."""
        for site in sites:
            if site in self._soon and (head := self._soon.pop(site)()):
                self._known[site] = self._countersigned(site, head)

    def _countersigned(self, site: str, head: Head) -> Anchor:
        if self._keys is None:
            return Anchor(head.lines, head.digest)
        if signer_of_line(self._keys.verifying_keys(site), head.digest, head.signature) is None:
            raise ParcelRejected("the head of its ledger is not signed with the key that the kits have for it")
        return sign_anchor(self._keys.signing_key(COORDINATOR), self._folder.name, site, head)

    def _write(self, call: Call, parcels: Iterable[Parcel]) -> None:
        line = {
            "site": call.site,
            "round": call.round,
            "operation": call.operation,
            "to": call.to,
            "parcels": [_as_received(parcel) for parcel in parcels],
            "head": self._known[call.site],
        }
        with (self._folder / RECEIVED_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def end_torn_line(path: Path) -> None:
    """So that what is written next does not go on with the line that a killed process left unfinished."""
    if path.exists() and not path.read_bytes().endswith(b"\n"):
        with path.open("a", encoding="utf-8") as file:
            file.write("\n")


def _as_received(parcel: Parcel) -> JsonObject:
    """What the coordinator can say of a parcel; of a sealed one, not what is inside."""
    digest = None if parcel.kind == SEALED else parcel.digest
    return {"kind": parcel.content, "bytes": parcel.size, "digest": digest}
