"""What a method hands to the sites by keyword, sorted into parcels and plain arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyclinic.federation.leaving.kinds import KINDS
from polyclinic.federation.leaving.parcel import Parcel


def sort_payload(payload: Mapping[str, Any]) -> tuple[dict[str, Parcel], dict[str, Any]]:
    """Keywords named like a kind become parcels; the others stay plain arguments."""
    parcels, arguments = {}, {}
    for name, value in payload.items():
        kind = name.replace("_", "-")
        if isinstance(value, Parcel):
            parcels[name] = value
        elif kind in KINDS:
            if value is not None:
                parcels[name] = Parcel(kind, value)
        else:
            arguments[name] = value
    return parcels, arguments
