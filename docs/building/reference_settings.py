"""Pages about the settings of a study, from the classes that read them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pydantic_core import PydanticUndefined
from schema_words import Schema, cell, code, meaning, table, words

from polyclinic.cli.plugins import rows_of
from polyclinic.settings import Settings
from polyclinic.study import Study
from polyclinic.study.study import PLAIN, VARIANTS

HEAD = ("setting", "may be", "default", "meaning")
#: pages of tables that come in variants: file, title, what a variant is called
PAGES = {
    "data": ("sources", "Sources of images: `[data]`", "source"),
    "sites": ("partitions", "Partitions: `[sites]`", "partition"),
    "task": ("tasks", "Tasks: `[task]`", "task"),
    "generator": ("generators", "Generators: `[generator]`", "generator"),
    "method": ("methods", "Methods: `[method]`", "method"),
}
#: what `polyclinic list` can list
LISTED = ("methods", "sources", "partitions", "tasks", "backbones", "encoders", "generators", "attacks", "kinds")


def settings_table(kind: type[Settings], without: Collection[str] = ()) -> str:
    """A Markdown table of a class of settings."""
    schema = kind.model_json_schema(mode="validation")
    rows = [_row(name, field, schema) for name, field in schema["properties"].items() if name not in without]
    return table(HEAD, [[*row[:2], _default(kind, name), row[3]] for name, row in rows])


def _row(name: str, field: Schema, schema: Schema) -> tuple[str, list[str]]:
    allowed = words(field, schema).replace(" or nothing", "")
    return name, [f"`{name}`", cell(allowed), "", meaning(field)]


def _default(kind: type[Settings], name: str) -> str:
    value: Any = kind.model_fields[name].get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "must be given"
    if value is None:
        return "not given"
    if isinstance(value, Settings):
        return "see its table"
    shown = code(list(value) if isinstance(value, tuple) else value)
    return shown if len(shown) < 80 else "all of them"


def study_page() -> str:
    """Tables of a study that have no variants, and where those with variants are."""
    parts = ["# Tables of a study", WRITTEN, STUDY_HEAD]
    top = {name: field for name, field in Study.model_fields.items() if name not in VARIANTS and name not in PLAIN}
    rows = [
        [f"`{name}`", code(list(f.default) if isinstance(f.default, tuple) else f.default), cell(f.description or "")]
        for name, f in top.items()
    ]
    parts += ["## At the top", table(("setting", "default", "meaning"), rows)]
    parts += [f"- `[{name}]`: [{title}]({file}.md)" for name, (file, title, _) in PAGES.items()]
    for name, kind in PLAIN.items():
        parts += [f"## `[{name}]`", settings_table(kind)]
    return _page(parts)


def variants_page(name: str) -> str:
    """All variants of one table: the settings of each, with those that all have in a table of their own."""
    file, title, word = PAGES[name]
    registry, key = VARIANTS[name]
    kinds = {one: registry[one] for one in registry}
    shared = set.intersection(*(_described(kind) for kind in kinds.values()))
    first = next(iter(kinds.values()))
    others = set(first.model_fields) - shared
    parts = [f"# {title}", WRITTEN, f"`{key}` chooses the {word}. `polyclinic list {file}` lists them."]
    if shared - {key}:
        parts += ["## Settings that all have", settings_table(first, others | {key})]
    summaries = {row["name"]: row["summary"] for row in rows_of(file)}
    for one, kind in kinds.items():
        parts += [f"## {one}", cell(summaries.get(one, "")) + _more(name, one)]
        if set(kind.model_fields) - shared - {key}:
            parts.append(settings_table(kind, shared | {key}))
    return _page(parts)


def _described(kind: type[Settings]) -> set[str]:
    return set(kind.model_fields)


def _more(table_name: str, one: str) -> str:
    return f" [Its page](../methods/{one}.md)." if table_name == "method" else ""


def names_page() -> str:
    """What `polyclinic list` prints, for all kinds of names."""
    parts = ["# Names", WRITTEN, "What a study can name, and `polyclinic list KIND` prints. Plug-ins add to it."]
    for kind in LISTED:
        rows = [[f"`{row['name']}`", cell(row["summary"])] for row in rows_of(kind)]
        parts += [f"## {kind}", table(("name", "what it is"), rows)]
    return _page(parts)


def _page(parts: list[str]) -> str:
    return "\n\n".join(parts) + "\n"


WRITTEN = "*This page is made from the code when the documentation is built.*"
STUDY_HEAD = (
    "A study is a TOML file. `polyclinic study new study.toml` writes one, `polyclinic study check study.toml` checks "
    "one. [Studies and results](../study.md) explains the tables. `--set TABLE.SETTING=VALUE` changes one setting."
)
