"""What a coordinator wrote down of the answers it received, for `polyclinic ledger verify`, which needs no torch."""

from __future__ import annotations

from pathlib import Path

from polyclinic.json_types import JsonObject, parse_json

RECEIVED_FILE = "received.jsonl"


def read_received(folder: Path) -> list[JsonObject]:
    """What a coordinator wrote down, oldest first, without a line that a killed process left unfinished."""
    path = folder / RECEIVED_FILE
    texts = path.read_bytes().splitlines() if path.exists() else []
    lines = [(number, _line(text)) for number, text in enumerate(texts, 1)]
    return [line | {"number": number} for number, line in lines if line is not None]


def _line(text: bytes) -> JsonObject | None:
    try:
        return parse_json(text)
    except ValueError:
        return None
