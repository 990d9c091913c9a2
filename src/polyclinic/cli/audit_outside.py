"""`polyclinic audit update` and `audit images`: audits of what other programs made; beside `polyclinic audit RUN`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from polyclinic.cli.audit import BUDGET, audit
from polyclinic.cli.groups import UNNAMED, DefaultCommand, UnnamedCommand
from polyclinic.errors import BadInput

OUT = typer.Option(Path("audit"), help="The folder for audit.json and pictures, which show images.")
JSON = typer.Option(False, "--json", help="Print audit.json, and nothing else on stdout.")


class AuditCommands(DefaultCommand):
    """`polyclinic audit --help` is the help of `polyclinic audit RUN`, which names the other two."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [UNNAMED, *args] if args[:1] == ["--help"] else args)


app = typer.Typer(cls=AuditCommands, help="Attack what left the sites of a run, an update, or synthetic images.")
app.command(UNNAMED, hidden=True, cls=UnnamedCommand)(audit)


@app.command()
def update(
    before: Path = typer.Option(..., help="Weights before the site trained: safetensors, npz or a torch file."),
    after: Path | None = typer.Option(None, help="Weights that the site sent."),
    change: Path | None = typer.Option(None, help="Instead of --after: the difference of weights that the site sent."),
    model: str = typer.Option(..., help="A backbone by name, or any network as package.module:callable."),
    images: Path = typer.Option(..., help="The images that the site trained with; sub-folders are classes."),
    settings: str = typer.Option(..., help="How it trained, such as lr=0.1,steps=1,batch=8,optimizer=sgd."),
    held_out: Path | None = typer.Option(None, "--held-out", help="Images of other patients, to compare with."),
    budget: str = BUDGET,
    device: str = typer.Option("cpu", help="cpu, cuda, ..."),
    out: Path = OUT,
    as_json: bool = JSON,
) -> None:
    """Attack an update that Flower, NVFlare, FL4Health, MONAI or plain PyTorch saved: can images be recovered?"""
    from polyclinic.audits.outside import audit_update
    from polyclinic.audits.outside_update import Sent, parse_settings

    _check_budget(budget)
    if (after is None) == (change is None):
        raise BadInput("--after: name the weights that the site sent, or with --change the difference; one of the two")
    known = parse_settings(settings)
    options: dict[str, Any] = {"settings": known, "held_out": held_out, "budget": budget, "device": device}
    sent = Sent(after, "--after") if after else Sent(change, "--change")  # type: ignore[arg-type]
    _show(audit_update(before, sent, model, images, out, **options), out, as_json)


@app.command()
def images(
    synthetic: Path = typer.Argument(..., help="A folder with the images that a generator made."),
    training: Path = typer.Option(..., help="The images that it was trained on."),
    held_out: Path = typer.Option(..., "--held-out", help="Images of other patients, 20 or more."),
    budget: str = BUDGET,
    out: Path = OUT,
    as_json: bool = JSON,
) -> None:
    """Search images of a generator for copies of its training images, and for signs of who was trained on."""
    from polyclinic.audits.outside import audit_images

    _check_budget(budget)
    _show(audit_images(synthetic, training, held_out, out, budget=budget), out, as_json)


def _check_budget(budget: str) -> None:
    from polyclinic.study.audit_settings import EFFORTS

    if budget not in EFFORTS:
        raise BadInput(f"--budget: no such choice: '{budget}'; choose quick, standard or thorough")


def _show(report: dict[str, Any], out: Path, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{report['audited']}: {report['verdict']}", box=box.SIMPLE_HEAD)
    for column in ("question", "attack", "verdict", "seconds"):
        table.add_column(column, no_wrap=True)
    table.add_column("why", overflow="fold")
    for row in report["findings"]:
        power = " ".join(f"Planted: {c['words']}: {'found' if c['found'] else 'missed'}." for c in row["power"])
        why = f"{row['words']} {row['doubt']} {power}".strip()
        table.add_row(row["question"], row["attack"], row["verdict"], f"{row['seconds']:.0f}", why, end_section=True)
    Console().print(table)
    for row in report["findings"]:
        if row["picture"]:
            typer.echo(f"{row['attack']}: {out / row['picture']}")
    typer.echo(f"all evidence: {out / 'audit.json'}")
