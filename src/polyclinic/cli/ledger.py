"""`polyclinic ledger`: check the chain of every site's ledger, and sum up what left."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import typer

from polyclinic.errors import BadInput, WorkFailed


def ledger(
    run: Path = typer.Argument(..., help="A run folder, or one ledger file."),
    lines: bool = typer.Option(False, "--lines", help="Print every line instead of a summary."),
) -> None:
    """Verify the ledgers of a run and show what left each site."""
    from polyclinic.federation.leaving.ledger import LedgerBroken, verify
    from polyclinic.formats import check_run_format

    check_run_format(run)
    files = [run] if run.is_file() else sorted((run / "ledger").glob("*.jsonl"))
    if not files:
        raise BadInput(f"{run}: holds no ledger; name a run folder or a ledger file")
    try:
        ledgers = {file.stem: verify(file) for file in files}
    except LedgerBroken as error:
        raise WorkFailed(f"the chain is broken: {error}") from None
    show_lines(ledgers) if lines else show_summary(ledgers)


def show_lines(ledgers: dict[str, list[dict]]) -> None:
    every = [{"site": site, **line} for site, entries in ledgers.items() for line in entries]
    wide = {name: max((len(str(line[name])) for line in every), default=0) for name in ("site", "operation", "kind")}
    for line in every:
        columns = "  ".join(f"{line[name]:<{wide[name]}}" for name in ("operation", "kind"))
        about = f"round {line['round']:>3}  {columns}  {line['bytes']:>10} B  to {line['to']}  {line['digest'][:16]}"
        typer.echo(f"{line['site']:<{wide['site']}}  {about}")


def show_summary(ledgers: dict[str, list[dict]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from polyclinic.cli.tables import human_bytes

    table = Table(title="what left each site (all chains hold)")
    for column in ("site", "kind", "parcels", "bytes"):
        table.add_column(column, justify="left" if column in ("site", "kind") else "right")
    for site, entries in ledgers.items():
        sizes: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for line in entries:
            sizes[line["kind"]] += line["bytes"]
            counts[line["kind"]] += 1
        for kind in sorted(sizes):
            table.add_row(site, kind, str(counts[kind]), human_bytes(sizes[kind]))
    Console().print(table)
