"""`polyclinic bench`: how fast this machine is, in about two minutes."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from polyclinic.errors import BadInput

if TYPE_CHECKING:
    from polyclinic.runner.compare.bench import Measured


def bench(
    only: list[str] = typer.Option(
        [], "--only", help="overhead, engines, generators, attacks or encoders; repeatable."
    ),
    json: bool = typer.Option(False, "--json", help="Print one JSON object instead of the table."),
    out: Path | None = typer.Option(None, "--out", help="Also write the JSON object to this file."),
) -> None:
    """Measure this machine: rounds, engines, generators, attacks and encoders, each in a few seconds."""
    from polyclinic.runner.compare.bench import PARTS, measure

    for name in only:
        if name not in PARTS:
            raise BadInput(f"--only: there is no part '{name}'; choose from {', '.join(PARTS)}")
    figures = measure(tuple(only), (lambda row: None) if json else _show)
    if json:
        typer.echo(json_format.dumps(figures))
    if out:
        out.write_text(json_format.dumps(figures, indent=1) + "\n", encoding="utf-8")


def _show(row: Measured) -> None:
    typer.echo(f"{row.value:>10} {row.unit:<9} {row.what:<75} {row.command}")
