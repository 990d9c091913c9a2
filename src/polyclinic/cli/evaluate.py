"""`polyclinic evaluate`: a model that somebody brought, on the sites of a study. Nothing is trained."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from polyclinic.cli.predict import ALLOW_IMPORT
from polyclinic.cli.run import PLUGIN, SET
from polyclinic.errors import BadInput
from polyclinic.files import atomic_write
from polyclinic.json_types import JsonObject


def evaluate(
    model: Path = typer.Argument(
        ..., help="A run folder, model.safetensors, an export (ONNX, TorchScript, MONAI bundle), or a file of weights."
    ),
    study: Path = typer.Option(..., "--study", help="The study whose sites and images are scored, a TOML file."),
    sets: list[str] = SET,
    split: str = typer.Option("test", help="Images to score: test or validation."),
    outputs: str = typer.Option("probabilities", help="What a foreign model gives: probabilities or logits."),
    label_map: list[str] = typer.Option(
        [],
        "--label-map",
        help="A class that the model calls by another name: ill=sick, north:ill=sick; ill=- leaves it out.",
    ),
    by: list[str] = typer.Option([], "--by", help="Figures of sub-groups: a column of data.columns; may be repeated."),
    against: Path = typer.Option(None, help="A second model: paired tests of the two on the same cases."),
    site: str = typer.Option(None, help="The site whose model is used, where each site has its own model."),
    ensemble: bool = typer.Option(
        False, "--ensemble", help="Use the models of all sites: the mean of their predictions."
    ),
    out: Path = typer.Option(None, help="Write all figures into this JSON file."),
    plugins: list[str] = PLUGIN,
    allow_import: list[str] = ALLOW_IMPORT,
    as_json: bool = typer.Option(False, "--json", help="Print all figures as JSON."),
) -> None:
    """Score a model on the images of a study's sites: per site and pooled, with intervals, calibration, sub-groups."""
    from polyclinic.runner.evaluate.evaluate import evaluate as library
    from polyclinic.study import load_study

    for name, value, choices in (
        ("--split", split, ("test", "validation")),
        ("--outputs", outputs, ("probabilities", "logits")),
    ):
        if value not in choices:
            raise BadInput(f"{name}: no such choice: '{value}'; choose {' or '.join(choices)}")
    found = library(
        model,
        load_study(study, sets),
        split=split,  # type: ignore[arg-type]
        outputs=outputs,  # type: ignore[arg-type]
        label_map=label_map,
        by=by,
        site=site,
        ensemble=ensemble,
        plugins=plugins,
        allow_import=allow_import,
        against=against,
    )
    if out is not None:
        atomic_write(out, json.dumps(found, indent=1) + "\n")
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        show(found)


def show(found: JsonObject) -> None:
    """The figures as tables."""
    from rich.console import Console
    from rich.table import Table

    names = [name for name in found["metrics"]["pooled"] if name != "loss"]
    table = Table(title=f"{found['model']}, {found['split']} images (95 % intervals)")
    for column in ("", "images", *names):
        table.add_column(column, justify="left" if not column else "right")
    intervals = found["intervals"]
    table.add_row(
        "all sites",
        f"{sum(found['images'].values()):,}",
        *_cells(found["metrics"]["pooled"], intervals["pooled"], names),
        end_section=True,
    )
    for name, images in found["images"].items():
        own = intervals["per_site"].get(name, {})
        table.add_row(name, f"{images:,}", *_cells(found["metrics"]["per_site"][name], own, names))
    for column, values in found["subgroups"].items():
        table.add_section()
        for value, one in values.items():
            table.add_row(f"{column} = {value}", f"{one['images']:,}", *_cells(one["metrics"], one["intervals"], names))
    console = Console()
    console.print(table)
    for name, one in found.get("changes", {}).items():
        chance = f", p = {one['p']:.3g}" if "p" in one else ""
        text = f"{name}: {one['value']:+.3f} ({one['low']:+.3f} to {one['high']:+.3f}{chance})"
        console.print(f"{text} beside {found['against']}", soft_wrap=True)
    for note in found["notes"]:
        console.print(note, soft_wrap=True)


def _cells(metrics: JsonObject, intervals: JsonObject, names: list[str]) -> list[str]:
    cells = []
    for name in names:
        text = f"{metrics[name]:.3f}" if name in metrics else "-"
        if name in intervals:
            text += f" ({intervals[name]['low']:.3f} to {intervals[name]['high']:.3f})"
        cells.append(text)
    return cells
