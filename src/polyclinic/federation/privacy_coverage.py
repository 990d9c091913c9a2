"""Collects the differential-privacy records of released parcels, and the parcels without one."""

from __future__ import annotations

from typing import Any

from polyclinic.federation.ledger.kinds import OF_NO_IMAGE
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.json_types import JsonMapping, JsonObject

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
