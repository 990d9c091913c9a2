"""`polyclinic worth`: what each site adds to the common model."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from polyclinic.cli.run import SET
from polyclinic.json_types import JsonObject


def worth(
    study: Path = typer.Argument(..., help="The study, a TOML file; its sites are simulated."),
    sets: list[str] = SET,
    retrainings: int = typer.Option(None, help="Runs that a method other than analytic may take."),
    metric: str = typer.Option(None, help="What a model is worth: a validation metric, such as auc or mae."),
    as_json: bool = typer.Option(False, "--json", help="Print the figures as JSON."),
) -> None:
    """Say what each site adds: leave-one-out and Shapley values, exact up to ten sites, sampled above."""
    from polyclinic.runner.compare.worth import worth as library
    from polyclinic.study import load_study

    found = library(load_study(study, sets), retrainings=retrainings, metric=metric)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        show_worth(found)


def show_worth(found: JsonObject) -> None:
    """The values of each site as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"what each site adds: {found['value']}")
    for column in ("site", "without it, worse by", "Shapley value"):
        table.add_column(column, justify="left" if column == "site" else "right")
    for site, one in found["sites"].items():
        between = f" ({one['low']:.4f} to {one['high']:.4f})" if "low" in one else ""
        table.add_row(site, f"{one['leave_one_out']:.4f}", f"{one['shapley']:.4f}{between}")
    console = Console()
    console.print(table)
    console.print(f"all sites: {found['all']:.4f}; no site: {found['none']:.4f}; {found['how']}", soft_wrap=True)
