"""A JSON Schema in words: what a field may be, and tables of fields. Settings and file formats are shown this way."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]

NAMES = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "object": "table",
    "null": "nothing",
}
LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
}


def words(schema: Schema, whole: Schema) -> str:
    """What a value may be: `whole number, at least 1`. `whole` has the definitions that `$ref` points to."""
    if "$ref" in schema:
        return words(_definition(schema["$ref"], whole), whole)
    if "const" in schema:
        return code(schema["const"])
    if "enum" in schema:
        return " or ".join(code(one) for one in schema["enum"])
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(dict.fromkeys(words(one, whole) for one in schema[several]))
    return _words_of_type(schema, whole)


def _words_of_type(schema: Schema, whole: Schema) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        return " or ".join(NAMES.get(one, one) for one in kind)
    if kind == "array":
        return f"list of {words(schema['items'], whole)}" if schema.get("items") else "list"
    limits = [text.format(schema[limit]) for limit, text in LIMITS.items() if limit in schema]
    return ", ".join([NAMES.get(str(kind), "any value"), *limits])


def _definition(reference: str, whole: Schema) -> Schema:
    found: Any = whole
    for part in reference.removeprefix("#/").split("/"):
        found = found[part]
    return found


def rows_of_fields(schema: Schema, whole: Schema, prefix: str = "") -> list[list[str]]:
    """Field, what it may be, whether it is always there, meaning; fields of tables inside follow their table."""
    if "$ref" in schema:
        schema = _definition(schema["$ref"], whole)
    rows = []
    for name, field in schema.get("properties", {}).items():
        always = "yes" if name in schema.get("required", ()) else "no"
        rows.append([f"`{prefix}{name}`", words(field, whole), always, meaning(field)])
        rows += rows_of_fields(field, whole, f"{prefix}{name}.")
    return rows


def meaning(field: Schema) -> str:
    return cell(field.get("description", ""))


def code(value: object) -> str:
    return f"`{cell(json.dumps(value, ensure_ascii=False))}`"


def cell(text: str) -> str:
    """Text that can stand in a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
