"""The page about files that commands write, from the JSON Schemas in the package."""

from __future__ import annotations

import json
from importlib.resources import files

from schema_words import cell, rows_of_fields, table

HEAD = """# Formats of files

*This page is made from the JSON Schemas in the package when the documentation is built.*

The schemas are in `polyclinic/schemas` of the installed package, and here to download. A field that a schema does not
name may be added by a method where the schema allows it. [Studies and results](../study.md#formats) says how formats
change.
"""
#: schema -> the file that it describes
FILES = {
    "result": "result.json",
    "history_line": "a line of history.jsonl",
    "ledger_line": "a line of ledger/SITE.jsonl",
    "comparison": "comparison.json",
    "tuning": "tuning.json",
    "audit": "audit.json",
}


def schemas() -> dict[str, str]:
    """The text of every schema by its name, those without a name in FILES last."""
    folder = files("polyclinic") / "schemas"
    found = {file.name.removesuffix(".schema.json"): file.read_text() for file in folder.iterdir()}
    order = [*FILES, *sorted(set(found) - set(FILES))]
    return {name: found[name] for name in order if name in found}


def formats_page() -> str:
    parts = [HEAD]
    for name, text in schemas().items():
        schema = json.loads(text)
        parts.append(f"## {FILES.get(name, schema['title'])}\n\n{cell(schema['description'])}")
        parts.append(f"Schema: [{name}.schema.json](schemas/{name}.schema.json)")
        parts.append(table(("field", "may be", "always there", "meaning"), rows_of_fields(schema, schema)))
    return "\n\n".join(parts) + "\n"
