"""The coordinator's books: bytes of the parcels that passed, by site, direction and kind; which of the released ones
differential privacy covers; and the heads of the sites' ledgers, how far each has come.

At a deployed run the coordinator also writes down what it received, in `received.jsonl` of its run folder: a line for
each answer, which `polyclinic ledger verify` compares with the site's ledger.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyclinic.data.allowed_paths import COORDINATOR
from polyclinic.federation.call import Call, Reply
from polyclinic.federation.ledger.keys import Anchor, Head, KeyRing, anchor_from_json, sign_anchor, signer_of_line
from polyclinic.federation.ledger.kinds import OF_NO_IMAGE, PUBLIC, ParcelRejected
from polyclinic.federation.ledger.parcel import SEALED, Parcel
from polyclinic.federation.ledger.verify import RECEIVED_FILE, read_received
from polyclinic.json_types import JsonMapping, JsonObject

SENT, RECEIVED = "sent", "received"


class Communication:
    """What crossed the border of each site, in bytes. `sent` left a site, `received` came to it.

    What sites received is counted when somebody asks, as digests are computed beside training.
    """

    def __init__(self, rows: Sequence[Sequence[Any]] = (), held: Mapping[str, str] | None = None) -> None:
        """`rows` and `held` are those of a checkpoint."""
        self._bytes: Counter[tuple[str, str, str, str]] = Counter()
        for *key, count in rows:
            self._bytes[tuple(key)] = count
        #: what sites received since it was counted last, and the digest of weights; the tensors are not kept for that
        self._uncounted: list[tuple[tuple[str, str, str, str], int, Any]] = []
        self.held = dict(held or {})  # digest of the weights each site received last

    def going(self, calls: Iterable[Call]) -> None:
        """Note what the sites are sent."""
        for call in calls:
            for parcel in call.parcels.values():
                digest = parcel.digest_soon if parcel.kind == "weights" else None
                key = (call.site, RECEIVED, parcel.content, call.operation)
                self._uncounted.append((key, parcel.size, digest))

    def came(self, call: Call, parcel: Parcel) -> None:
        """Count what a site has sent in answer to a call."""
        self._bytes[call.site, SENT, parcel.content, call.operation] += parcel.size

    def rows(self) -> list[list]:
        """All bytes up to now, by site, direction, kind and operation."""
        self._count_received()
        return [[*key, count] for key, count in sorted(self._bytes.items())]

    @property
    def total(self) -> int:
        self._count_received()
        return self._bytes.total()

    def _count_received(self) -> None:
        """Count what sites received; weights that one received last time need not travel again."""
        for key, size, digest in self._uncounted:
            if digest:
                if self.held.get(key[0]) == digest.result():
                    continue
                self.held[key[0]] = digest.result()
            self._bytes[key] += size
        self._uncounted.clear()

    def summary(self, sites: tuple[str, ...]) -> JsonObject:
        """The `communication` table of a result. `per_site` and `by_kind` each add up to `total_bytes`."""
        by: list[Counter[str]] = [Counter() for _ in range(4)]
        for *key, count in self.rows():
            for sums, name in zip(by, key, strict=True):
                sums[name] += count
        per_site, directions, kinds, operations = (dict(sorted(sums.items())) for sums in by)
        return {
            "total_bytes": self.total,
            "sent_bytes": directions.get(SENT, 0),
            "received_bytes": directions.get(RECEIVED, 0),
            "by_kind": kinds,
            "by_operation": operations,
            "per_site": dict.fromkeys(sites, 0) | per_site,
        }


class Coverage:
    """`records`: each site's last record, with what all its parcels together cover; `uncovered`: kinds without one."""

    def __init__(self, plain: JsonMapping | None = None) -> None:
        self.records: dict[str, JsonObject] = dict((plain or {}).get("records", {}))
        self.uncovered: set[str] = set((plain or {}).get("uncovered", ()))

    def plain(self) -> JsonObject:
        """What a checkpoint keeps."""
        return {"records": self.records, "uncovered": sorted(self.uncovered)}

    def add(self, site: str, record: JsonMapping) -> None:
        """A record about this site's images: of a parcel, or of what a coordinator trained on what it had sent."""
        before = self.records.get(site, {})
        joined = {name: _union(before.get(name, []), record[name]) for name in ("covers", "does_not_cover")}
        self.records[site] = {**record, **joined}

    def note(self, site: str, parcel: Parcel) -> None:
        """A site released this parcel."""
        if parcel.privacy is not None and _is_record(parcel.privacy):
            self.add(site, parcel.privacy)
        elif parcel.content not in OF_NO_IMAGE and (parcel.tensors or parcel.metadata.keys() - PUBLIC):
            self.uncovered.add(parcel.content)


def _is_record(privacy: JsonMapping) -> bool:
    """Whether this is a record at all: it comes from outside."""
    numbers = all(isinstance(privacy.get(name), int | float) for name in ("epsilon", "delta", "steps"))
    return numbers and all(isinstance(privacy.get(name), list) for name in ("covers", "does_not_cover"))


def _union(a: list[Any], b: list[Any]) -> list[str]:
    return list(dict.fromkeys(str(text) for text in [*a, *b]))


class Heads:
    """The heads of the ledgers of all sites of one run. A ledger that went back, or is another one now, is refused."""

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
