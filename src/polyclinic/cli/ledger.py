"""`polyclinic ledger`: check every site's ledger, and say what left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from polyclinic.cli.default_command import DefaultCommand

if TYPE_CHECKING:
    from polyclinic.federation.ledger.verify import Checked

HELP = """Check the ledgers of a run, and say what left each site.

`polyclinic ledger RUN` sums up; with --lines it prints every line. Write ./verify for a folder named verify.
"""
app = typer.Typer(cls=DefaultCommand, help=HELP)

RUN = typer.Argument(..., help="A run folder (at a site, KIT/runs/NAME), or one ledger file.")
KEYS = typer.Option(None, help="The file site_keys.toml with the sites' public keys, where RUN is not in a kit.")
AGAINST = typer.Option(None, help="The coordinator's run folder: what it received is compared with the ledgers.")


@app.command("default", hidden=True)
def summary(
    run: Path = RUN,
    lines: bool = typer.Option(False, "--lines", help="Print every line instead of a summary."),
    keys: Path | None = KEYS,
) -> None:
    """Check the ledgers of a run, and sum up what left each site."""
    from polyclinic.federation.ledger.verify import check_run

    ledgers = check_run(run, keys)
    if lines:
        show_lines(ledgers)
    else:
        show_summary(ledgers)


@app.command()
def verify(run: Path = RUN, keys: Path | None = KEYS, against: Path | None = AGAINST) -> None:
    """Find any line that was changed, removed, added, moved or forged, and any ledger that was cut short or deleted.

    Exit code 1, with the file and the line, where a ledger does not hold.
    """
    from polyclinic.federation.ledger.verify import check_run

    for site, checked in check_run(run, keys, against).items():
        typer.echo(sentence_about(site, checked))


@app.command()
def show(
    run: Path = RUN,
    for_officer: bool = typer.Option(False, "--for-officer", help="Plain sentences for a data protection officer."),
    keys: Path | None = KEYS,
) -> None:
    """Print every line of the ledgers, or what they mean in plain sentences."""
    from polyclinic.cli.officer import refusals, sentences
    from polyclinic.federation.ledger.verify import check_run

    ledgers = check_run(run, keys)
    if not for_officer:
        show_lines(ledgers)
        return
    for site, checked in ledgers.items():
        typer.echo("\n".join([sentence_about(site, checked), *sentences(checked.lines), ""]))
    typer.echo("\n".join(refusals(run)))


def sentence_about(site: str, checked: Checked) -> str:
    """What is known about a ledger that holds."""
    count = len(checked.lines)
    words = [f"{site}: {count} lines, each follows the one before it"]
    if checked.unsigned:
        many = "all" if checked.unsigned == count else f"the first {checked.unsigned}"
        words.append(f"{many} are unsigned (written by an older version): nobody can tell whether they were rewritten")
    if checked.unsigned < count:
        words.append(
            "signatures are right" if checked.signatures_checked else "signatures were not checked; name --keys"
        )
    if checked.seen:
        words.append(f"records outside the ledger confirm {checked.seen} lines")
    else:
        words.append("nothing outside the ledger says how many lines it must have")
    if checked.countersigned:
        words.append(f"{checked.countersigned} are counter-signed by the coordinator")
    if checked.not_received:
        lines = ", ".join(map(str, checked.not_received))
        words.append(f"what left in line {lines} did not reach the coordinator")
    return "; ".join(words) + "."


def show_lines(ledgers: Mapping[str, Checked]) -> None:
    every = [{"site": site, **line} for site, checked in ledgers.items() for line in checked.lines]
    wide = {name: max((len(str(line[name])) for line in every), default=0) for name in ("site", "operation", "kind")}
    for line in every:
        columns = "  ".join(f"{line[name]:<{wide[name]}}" for name in ("operation", "kind"))
        about = f"round {line['round']:>3}  {columns}  {line['bytes']:>10} B  to {line['to']}  {line['digest'][:16]}"
        if of_sum := line.get("sum"):
            about += f"  in sum {of_sum['id']} of {of_sum['sites']} sites"
        typer.echo(f"{line['site']:<{wide['site']}}  {about}")


def show_summary(ledgers: Mapping[str, Checked]) -> None:
    from rich.console import Console
    from rich.table import Table

    from polyclinic.messages import human_bytes

    unsigned = [site for site, checked in ledgers.items() if checked.unsigned]
    table = Table(title="what left each site (all chains hold)")
    for column in ("site", "kind", "parcels", "bytes"):
        table.add_column(column, justify="left" if column in ("site", "kind") else "right")
    for site, checked in ledgers.items():
        sizes: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for line in checked.lines:
            sizes[line["kind"]] += line["bytes"]
            counts[line["kind"]] += 1
        for kind in sorted(sizes):
            table.add_row(site, kind, str(counts[kind]), human_bytes(sizes[kind]))
    console = Console()
    console.print(table)
    if unsigned:
        console.print(f"unsigned lines, written by an older version: {', '.join(unsigned)}", soft_wrap=True)
