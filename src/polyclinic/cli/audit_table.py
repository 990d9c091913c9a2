"""What `polyclinic audit` prints: one table of verdicts, the threat model as another, and where the evidence lies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

STYLES = {"leaks": "bold red", "withstood": "green", "not tested": "yellow"}
MOST_WORDS = 150  # letters of a cell


def show_verdicts(report: Mapping[str, Any], run: Path) -> None:
    """A line for each kind of parcel and question; who the attacker is; where pictures and figures lie."""
    console = Console()
    console.print(verdict_table(report))
    console.print(threat_table(report))
    if "coordinator" in report:
        console.print(coordinator_table(report["coordinator"]))
    for kind, verdict in report["verdicts"].items():
        if verdict["not_tried"]:
            typer.echo(f"{kind}, not tried: {'; '.join(verdict['not_tried'])}")
    for kind, verdict in report["verdicts"].items():
        for picture in verdict.get("pictures", []):
            typer.echo(f"{kind}: {run / picture}")
    typer.echo(f"all evidence: {run / 'audit.json'}")


def verdict_table(report: Mapping[str, Any]) -> Table:
    title = f"{report['method']}: what the parcels give away (budget {report['budget']})"
    table = Table(title=title, show_lines=True)
    for column in ("kind", "question", "verdict", "attacked", "attacks", "why"):
        table.add_column(column, overflow="fold", no_wrap=column in ("verdict",))
    for kind, of_kind in report["verdicts"].items():
        for row in _rows(kind, of_kind):
            table.add_row(*row)
    return table


def _rows(kind: str, of_kind: Mapping[str, Any]) -> Iterator[tuple[str | Text, ...]]:
    attacked = f"{of_kind['attacked']} of {of_kind['left']}" if "attacked" in of_kind else "-"
    if not of_kind.get("questions"):
        yield kind, "-", _word(of_kind["verdict"]), attacked, "-", shorten(of_kind["words"])
        return
    for name, one in of_kind["questions"].items():
        attacks = f"{', '.join(one['attacks'])} ({one['seconds']:.0f} s)" if one["attacks"] else "-"
        yield kind, name, _word(one["verdict"]), attacked, attacks, shorten(one["why"])


def threat_table(report: Mapping[str, Any]) -> Table:
    """Who attacks: what it holds and knows, and what it lacks."""
    table = Table(title="the attacker", show_header=False)
    for row in report["threat_table"]:
        table.add_row(*row)
    return table


def coordinator_table(found: Mapping[str, Any]) -> Table:
    """What crafted weights got back from a site, without and with its incoming check."""
    table = Table(title=f"a coordinator that chooses the weights: {found['verdict']}", caption=shorten(found["why"]))
    for column in ("attack", "incoming check", "images back", "other images named", "PSNR, dB"):
        table.add_column(column)
    for row in found["rows"]:
        back = "stopped" if row["stopped"] else f"{row['identified']} of {row['of']}"
        psnr = "-" if row["psnr"] is None else f"{row['psnr']:.1f}"
        table.add_row(row["attack"], "on" if row["checked"] else "off", back, str(row["by_chance"]), psnr)
    return table


def _word(word: str) -> Text:
    return Text(word, STYLES.get(word, ""))


def shorten(words: str) -> str:
    """The first words of a long sentence; all of it is in audit.json."""
    if len(words) <= MOST_WORDS:
        return words
    return words[:MOST_WORDS].rsplit(" ", 1)[0] + " ..."
