"""What a method hands to the sites by keyword, sorted into parcels and plain arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyclinic.federation.leaving.encodings import ROUNDING, Encoding
from polyclinic.federation.leaving.kinds import KINDS
from polyclinic.federation.leaving.parcel import Parcel, shortened


def sort_payload(payload: Mapping[str, Any], wire: Encoding = "exact") -> tuple[dict[str, Parcel], dict[str, Any]]:
    """Keywords named like a kind become parcels; the others stay plain arguments.

    `wire`: how numbers travel to a site, where that rounds them; a difference is of what a site sends back.
    """
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
    if wire in ROUNDING:
        parcels = {name: shortened(parcel, wire) for name, parcel in parcels.items()}
    return parcels, arguments
