"""Counts the bytes of encoded parcels, by site, direction, kind and operation."""

from __future__ import annotations

from collections import Counter

from polyclinic.json_types import JsonObject

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
