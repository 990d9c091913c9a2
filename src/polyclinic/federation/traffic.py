"""Traffic: the bytes of encoded parcels that pass between coordinator and sites, by site, direction and kind; and which
of the released ones differential privacy covers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from polyclinic.federation.call import Call
from polyclinic.federation.ledger.kinds import OF_NO_IMAGE
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.json_types import JsonMapping, JsonObject

SENT, RECEIVED = "sent", "received"


class Communication:
    """What crossed the border of each site, in bytes. `sent` left a site, `received` came to it."""

    def __init__(self, rows: list[list] | None = None) -> None:
        self._bytes: Counter[tuple[str, str, str, str]] = Counter()
        for site, direction, kind, operation, count in rows or []:
            self._bytes[site, direction, kind, operation] = count

    def count(self, site: str, direction: str, kind: str, operation: str, size: int) -> None:
        self._bytes[site, direction, kind, operation] += size

    def rows(self) -> list[list]:
        return [[*key, count] for key, count in sorted(self._bytes.items())]

    @property
    def total(self) -> int:
        return self._bytes.total()

    def summary(self, sites: tuple[str, ...]) -> JsonObject:
        """The `communication` table of a result. `per_site` and `by_kind` each add up to `total_bytes`."""
        return {
            "total_bytes": self.total,
            "sent_bytes": sum(n for key, n in self._bytes.items() if key[1] == SENT),
            "received_bytes": sum(n for key, n in self._bytes.items() if key[1] == RECEIVED),
            "by_kind": self._by(2),
            "by_operation": self._by(3),
            "per_site": dict.fromkeys(sites, 0) | self._by(0),
        }

    def _by(self, position: int) -> dict[str, int]:
        sums: Counter[str] = Counter()
        for key, count in self._bytes.items():
            sums[key[position]] += count
        return dict(sorted(sums.items()))


class Received(NamedTuple):
    """A parcel that a site received, as far as counting needs it: its tensors are not kept for that."""

    site: str
    operation: str
    content: str
    size: int
    #: that of weights: those that a site holds already do not count
    digest: Future[str] | None

    @classmethod
    def of(cls, call: Call, parcel: Parcel) -> Received:
        digest = parcel.digest_soon if parcel.kind == "weights" else None
        return cls(call.site, call.operation, parcel.content, parcel.size, digest)


class Traffic:
    """Counts parcels; what sites received is counted when somebody asks, as digests are computed beside training."""

    def __init__(self, rows: Any = None, held: Mapping[str, str] | None = None) -> None:
        """`rows` and `held` are those of a checkpoint."""
        self._counts = Communication(rows)
        self._uncounted: list[Received] = []  # what sites received since it was counted last
        self.held = dict(held or {})  # digest of the weights each site received last

    def going(self, calls: Iterable[Call]) -> None:
        """Note what the sites are sent."""
        for call in calls:
            self._uncounted += [Received.of(call, parcel) for parcel in call.parcels.values()]

    def sent(self, call: Call, parcel: Parcel) -> None:
        """Count what a site has sent in answer to a call."""
        self._counts.count(call.site, SENT, parcel.content, call.operation, parcel.size)

    def counted(self) -> Communication:
        """The bytes of all parcels up to now."""
        for received in self._uncounted:
            self._count_received(received)
        self._uncounted.clear()
        return self._counts

    def _count_received(self, received: Received) -> None:
        """Count what a site received; weights that it received last time need not travel again."""
        site = received.site
        if received.digest:
            digest = received.digest.result()
            if self.held.get(site) == digest:
                return
            self.held[site] = digest
        self._counts.count(site, RECEIVED, received.content, received.operation, received.size)


#: metadata that tells no more than sizes, which count as public
PUBLIC = frozenset({"samples", "steps"})


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
