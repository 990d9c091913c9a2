"""Figures of a run that may be under way: curves, time left, failures, and what has left each site."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from polyclinic.json_types import JsonObject
from polyclinic.report.serve.reading import is_number, numbers, parsed, table

#: points of a curve
MOST_POINTS = 1000
#: the last rounds, by which the time left is estimated
RECENT = 5


def total_bytes(result: JsonObject | None, history: list[JsonObject]) -> float:
    """What was carried so far."""
    found = table(result, "communication") if result is not None else history[-1] if history else {}
    return numbers(found).get("total_bytes", 0)


def seconds_left(history: list[JsonObject], rounds: Any, age: float) -> float | None:
    """How long the rounds that are left will take, by the mean of the last ones; None before the first.

    `age` are seconds since the last round was finished: the present round has had them already."""
    recent = [line["seconds"] for line in history[-RECENT:] if is_number(line.get("seconds"))]
    if not recent or not isinstance(rounds, int):
        return None
    each = sum(recent) / len(recent)
    return round(max(0.0, each * (rounds - history[-1]["round"]) - min(age, each)), 1)


def curves(history: list[JsonObject]) -> JsonObject:
    """Rounds, seconds and bytes, and each metric of the validation images: of all sites together, and of each site.

    A long history is thinned out evenly; its last point is always there.
    """
    step = max(1, math.ceil(len(history) / MOST_POINTS))
    shown = history[::-1][::step][::-1]
    scored = [line for line in shown if isinstance(line.get("validation"), dict)]
    per_site = [table(line["validation"], "per_site") for line in scored]
    sites = sorted({site for one in per_site for site in one})
    return {
        "rounds": [line["round"] for line in shown],
        "bytes": [line.get("total_bytes") if is_number(line.get("total_bytes")) else None for line in shown],
        "scored": [line["round"] for line in scored],
        "pooled": _columns([numbers(line["validation"].get("pooled")) for line in scored]),
        "per_site": {site: _columns([numbers(one.get(site)) for one in per_site]) for site in sites},
    }


def _columns(rows: list[dict[str, float]]) -> dict[str, list[float | None]]:
    """Every name with its value in each row, None where a row has none."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def failures(history: list[JsonObject]) -> list[JsonObject]:
    """Which sites failed, in which round, and why: the last fifty."""
    found = [
        {"round": line["round"], "site": site, "reason": str(reason)[:1000]}
        for line in history
        for site, reason in table(line, "failed").items()
    ]
    return found[-50:]


def what_left(folder: Path) -> list[JsonObject]:
    """Parcels and bytes that left each site, by kind: from the ledgers as they grow."""
    rows = []
    for file in sorted((folder / "ledger").glob("*.jsonl")):
        if file.is_symlink():
            continue
        parcels, sizes = _sums(file)
        rows += [
            {"site": file.stem, "kind": kind, "parcels": parcels[kind], "bytes": sizes[kind]} for kind in sorted(sizes)
        ]
    return rows


_SUMS: dict[Path, tuple[int, Counter[str], Counter[str]]] = {}


def _sums(file: Path) -> tuple[Counter[str], Counter[str]]:
    """Parcels and bytes of a ledger by kind. Only what was added since the last look is read; a ledger only grows."""
    place, parcels, sizes = _SUMS.get(file, (0, Counter(), Counter()))
    if place > file.stat().st_size:  # a run that was begun anew
        place, parcels, sizes = 0, Counter(), Counter()
    parcels, sizes = parcels.copy(), sizes.copy()
    with file.open("rb") as opened:
        opened.seek(place)
        for raw in opened:
            if not raw.endswith(b"\n"):
                break
            place += len(raw)
            line = parsed(raw.decode("utf-8", "replace"))
            if isinstance(line, dict) and isinstance(line.get("bytes"), int):
                parcels[str(line.get("kind"))] += 1
                sizes[str(line.get("kind"))] += line["bytes"]
    _SUMS[file] = (place, parcels, sizes)
    return parcels, sizes
