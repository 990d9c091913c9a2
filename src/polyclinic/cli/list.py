"""`polyclinic list KIND`: what can be named in a study, in one sentence each, and where it comes from."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from polyclinic.errors import BadInput
from polyclinic.json_types import JsonObject
from polyclinic.registry import GROUPS

#: methods, sources, ...
KINDS = [group.removeprefix("polyclinic.") for group in GROUPS.values()]
#: the rooms of the registries that are not called like what they hold
ROOMS = {
    "sources": "data.datasets",
    "partitions": "data.partitions",
    "backbones": "models",
    "encoders": "models.encoders",
    "attacks": "audits",
    "kinds": "federation.ledger.kinds",
}


def list_entries(
    kind: str = typer.Argument(..., help=", ".join(KINDS)),
    study: Path | None = typer.Option(None, help="A study whose plug-ins are to be listed, too.", show_default=False),
    as_json: bool = typer.Option(False, "--json", help="Print a JSON list."),
) -> None:
    """List what a study can name (methods, sources, partitions and others), and where each comes from."""
    from polyclinic.settings import no_such_choice

    if kind not in KINDS:
        raise BadInput(f"KIND: {no_such_choice(kind, KINDS)}")
    if study is not None:
        from polyclinic.study import load_study

        load_study(study)
    rows = rows_of(kind)
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        typer.echo(f"{row['name']:{width}}  {row['summary']} [{row['from']}]")


def rows_of(kind: str) -> list[JsonObject]:
    """Name, sentence and origin of every entry; of one that cannot be imported, why not."""
    import importlib

    from polyclinic.registry import registry_of, summary_of

    importlib.import_module(f"polyclinic.{ROOMS.get(kind, kind)}")
    registry = registry_of(kind)
    rows = []
    for name in registry:
        try:
            summary = summary_of(registry[name])
        except BadInput as error:
            summary = f"cannot be used: {error}"
        rows.append({"name": name, "summary": summary, "from": registry.origin(name)})
    return rows
