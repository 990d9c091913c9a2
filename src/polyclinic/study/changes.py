"""Changes of single settings: `--set a.b=c`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping

from polyclinic.errors import BadInput
from polyclinic.json_types import JsonMapping, JsonObject


def parse_sets(sets: list[str]) -> JsonObject:
    """`a.b=c` texts as a table of changes; c is read as TOML where it is, else as text."""
    changes: JsonObject = {}
    for text in sets:
        path, equals, value = text.partition("=")
        if not equals or not path.strip():
            raise BadInput(f"--set {text}: write it as table.setting=value, for example method.rounds=5")
        try:
            changes[path.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            changes[path.strip()] = value.strip()
    return changes


def _changed(tables: JsonMapping, changes: JsonMapping) -> JsonObject:
    changed = {name: dict(value) if isinstance(value, Mapping) else value for name, value in tables.items()}
    for path, value in changes.items():
        *parents, last = path.split(".")
        table = changed
        for parent in parents:
            table = table.setdefault(parent, {})
            if not isinstance(table, dict):
                raise BadInput(f"{path}: '{parent}' is not a table")
        table[last] = value
    return changed
