"""What `polyclinic audit` prints: one table of verdicts, the threat model as another, and where the evidence lies.

Tables fit into 80 columns without breaking a word: names stand as they are, and only sentences are wrapped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

STYLES = {"leaks": "bold red", "withstood": "green", "not tested": "yellow"}
LINES = 3  #: of a sentence in a cell, at most; all of it is in audit.json
FEWEST_LETTERS = 28  #: of a line of a sentence, in a narrow terminal


def show_verdicts(report: Mapping[str, Any], run: Path) -> None:
    """A line for each kind of parcel and question; who the attacker is; where pictures and figures lie."""
    console = Console()
    console.print(verdict_table(report, console.width))
    console.print(threat_table(report))
    if "coordinator" in report:
        console.print(coordinator_table(report["coordinator"]))
    for kind, verdict in report["verdicts"].items():
        for words in (*attacks_of(kind, verdict), *gaps_of(kind, verdict)):
            console.print(Text(words))
    for kind, verdict in report["verdicts"].items():
        for picture in verdict.get("pictures", []):
            typer.echo(f"{kind}: {run / picture}")
    typer.echo(f"all evidence: {run / 'audit.json'}")


def verdict_table(report: Mapping[str, Any], width: int = 80) -> Table:
    """A row for each kind and question; the kind stands in its first row."""
    title = f"{report['method']}: what the parcels give away (budget {report['budget']})"
    rows = {kind: list(_rows(kind, of_kind)) for kind, of_kind in report["verdicts"].items()}
    table = Table(title=title, box=box.SIMPLE_HEAD)
    names = ("kind", "attacked", "question", "verdict")
    for column in names:
        table.add_column(column, no_wrap=True)
    table.add_column("why", overflow="fold")
    letters = _letters_left(names, [row for of_kind in rows.values() for row in of_kind], width)
    for of_kind in rows.values():
        for number, (*cells, why) in enumerate(of_kind):
            table.add_row(*cells, shorten(why, LINES * letters), end_section=number + 1 == len(of_kind))
    return table


def _letters_left(names: tuple[str, ...], rows: list[tuple[Any, ...]], width: int) -> int:
    """Of a line, for the sentence beside columns that are as wide as their longest entry (and two blanks)."""
    widest = [max(len(str(cell)) for cell in column) for column in zip(names, *(row[:-1] for row in rows), strict=True)]
    return max(FEWEST_LETTERS, width - sum(widest) - 2 * (len(names) + 1) - 2)


def _rows(kind: str, of_kind: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    attacked = f"{of_kind['attacked']} of {of_kind['left']}" if "attacked" in of_kind else "-"
    if not of_kind.get("questions"):
        yield kind, attacked, "-", _word(of_kind["verdict"]), of_kind["words"]
        return
    for number, (name, one) in enumerate(of_kind["questions"].items()):
        first = (kind, attacked) if number == 0 else ("", "")
        yield *first, name, _word(one["verdict"]), one["why"]


def attacks_of(kind: str, of_kind: Mapping[str, Any]) -> Iterator[str]:
    """Which attacks asked which question, and what they cost."""
    asked = of_kind.get("questions", {})
    done = [
        f"{name}: {', '.join(one['attacks'])} ({one['seconds']:.0f} s)" for name, one in asked.items() if one["attacks"]
    ]
    if done:
        yield f"{kind}, attacks: {'; '.join(done)}"
    if of_kind.get("released"):
        yield f"{kind}: the released model was attacked, too"


def gaps_of(kind: str, of_kind: Mapping[str, Any]) -> Iterator[str]:
    if of_kind["not_tried"]:
        yield f"{kind}, not tried: {'; '.join(of_kind['not_tried'])}"


def threat_table(report: Mapping[str, Any]) -> Table:
    """Who attacks: what it holds and knows, and what it lacks."""
    table = Table(title="the attacker", show_header=False, box=box.SIMPLE)
    table.add_column(no_wrap=True)
    table.add_column()
    for row in report["threat_table"]:
        table.add_row(*row)
    return table


def coordinator_table(found: Mapping[str, Any]) -> Table:
    """What crafted weights got back from a site, without and with its incoming check."""
    title = f"a coordinator that chooses the weights: {found['verdict']}"
    table = Table(title=title, caption=found["why"], box=box.SIMPLE_HEAD)
    for column in ("attack", "incoming check", "images back", "other images named", "PSNR, dB"):
        table.add_column(column, no_wrap=column == "attack")
    for row in found["rows"]:
        back = "stopped" if row["stopped"] else f"{row['identified']} of {row['of']}"
        psnr = "-" if row["psnr"] is None else f"{row['psnr']:.1f}"
        table.add_row(row["attack"], "on" if row["checked"] else "off", back, str(row["by_chance"]), psnr)
    return table


def _word(word: str) -> Text:
    return Text(word, STYLES.get(word, ""))


def shorten(words: str, most: int) -> str:
    """The first words of a long sentence."""
    if len(words) <= most:
        return words
    return words[: most - 4].rsplit(" ", 1)[0] + " ..."
