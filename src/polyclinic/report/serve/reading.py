"""Files that may be missing, damaged, half-written or huge: they read as nothing, and never end a page."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from polyclinic.json_types import JsonObject, parse_json

#: bytes of a file that is read to be shown
MOST_BYTES = 50_000_000


def read_json(file: Path) -> Any:
    """The content of a JSON file; None where it is missing, damaged, a link, or too large to be shown."""
    return parsed(read_text(file))


def read_text(file: Path) -> str:
    """The text of a file; nothing where it is missing, a link, or too large to be shown."""
    try:
        if file.is_symlink() or file.stat().st_size > MOST_BYTES:
            return ""
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def parsed(text: str) -> Any:
    """What a JSON text says; None where it is none."""
    try:
        return parse_json(text)
    except (ValueError, RecursionError):
        return None


def changed_at(file: Path) -> float:
    """When a file was written; 0 where there is none."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def plain(value: Any) -> Any:
    """A value as strict JSON has it: NaN and infinity become nothing, a date of a TOML file its text."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


def table(values: JsonObject, name: str) -> JsonObject:
    """A table inside a table; an empty one where there is none."""
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def numbers(values: Any) -> dict[str, float]:
    """Those entries of a table that are numbers: a damaged or hostile file may hold anything else."""
    return {name: one for name, one in values.items() if is_number(one)} if isinstance(values, dict) else {}


def word(values: JsonObject, name: str) -> str | int | float | None:
    """A plain value of a table, or nothing."""
    found = values.get(name)
    return found if isinstance(found, (str, int, float)) else None
