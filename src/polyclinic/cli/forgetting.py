"""`polyclinic forgetting`: what a serial method forgets from site to site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from polyclinic.cli.run import PLUGIN
from polyclinic.errors import BadInput


def forgetting(
    run: Path = typer.Argument(..., help="The folder of a run of a serial method (cwt, splitnn)."),
    split: str = typer.Option("train", help="Images to look at: train (as in the paper), validation or test."),
    plugins: list[str] = PLUGIN,
    quiet: bool = typer.Option(False, "--quiet", help="Write forgetting.json and forgetting.png, print nothing."),
) -> None:
    """Print each site's score under the model after each hand-over: rows are data, columns the site trained last."""
    from polyclinic.runner.compare import forgetting as library

    if split not in ("train", "validation", "test"):
        raise BadInput(f"--split: no such split: '{split}'; choose train, validation or test")
    found = library.matrices(run, split, plugins)
    library.write(found, run)
    if not quiet:
        for number, table in found["rounds"].items():
            _print(number, table, found)
        typer.echo(f"drawn in {run / 'forgetting.png'}")


def _print(number: int, matrix: dict[str, dict[str, float]], found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"round {number}: {found['metric']} on {found['split']} images after each hand-over")
    table.add_column("data \\ model")
    for site in matrix:
        table.add_column(site, justify="right")
    for site, row in matrix.items():
        table.add_row(site, *(f"{row[turn]:.3f}" if turn in row else "-" for turn in matrix))
    Console().print(table)
