"""`polyclinic evaluate`: a model of somebody, on the sites of a study; `polyclinic worth`: what each site adds;
`polyclinic forgetting`: what a serial method forgets from site to site."""

import json
from pathlib import Path
from typing import Any

import typer

from polyclinic.cli.run import ALLOW_IMPORT, ENSEMBLE, PLUGIN, SET, SITE, check_choice
from polyclinic.files import atomic_write, check_place
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
        [], "--label-map", help="A class that the model calls otherwise: ill=sick, north:ill=sick; ill=- drops it."
    ),
    by: list[str] = typer.Option([], "--by", help="Figures of sub-groups: a column of data.columns; may be repeated."),
    against: Path = typer.Option(None, help="A second model: paired tests of the two on the same cases."),
    site: str = SITE,
    ensemble: bool = ENSEMBLE,
    out: Path = typer.Option(None, help="Write all figures into this JSON file."),
    plugins: list[str] = PLUGIN,
    allow_import: list[str] = ALLOW_IMPORT,
    as_json: bool = typer.Option(False, "--json", help="Print all figures as JSON."),
) -> None:
    """Score a model on the images of a study's sites: per site and pooled, with intervals, calibration, sub-groups."""
    from polyclinic.runner.evaluate.evaluate import evaluate as library
    from polyclinic.study import load_study

    if out is not None:
        check_place(out)
    check_choice("--split", split, "test", "validation")
    check_choice("--outputs", outputs, "probabilities", "logits")
    asked: Any = {"split": split, "outputs": outputs, "label_map": label_map, "by": by, "against": against}
    chosen: Any = {"site": site, "ensemble": ensemble, "plugins": plugins, "allow_import": allow_import}
    found = library(model, load_study(study, sets), **asked, **chosen)
    if out is not None:
        atomic_write(out, json.dumps(found, indent=1) + "\n")
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        show(found)


def show(found: JsonObject) -> None:
    """The figures as tables."""
    from rich.console import Console

    from polyclinic.cli.tables import print_table

    names = [name for name in found["metrics"]["pooled"] if name != "loss"]
    intervals, images = found["intervals"], found["images"]

    def row(name: str, count: int, metrics: JsonObject, ends: JsonObject) -> list[str]:
        cells = [f"{metrics[one]:.3f}" if one in metrics else "-" for one in names]
        between = [f" ({ends[one]['low']:.3f} to {ends[one]['high']:.3f})" if one in ends else "" for one in names]
        return [name, f"{count:,}", *(cell + end for cell, end in zip(cells, between, strict=True))]

    rows: list[Any] = [row("all sites", sum(images.values()), found["metrics"]["pooled"], intervals["pooled"]), None]
    for name, count in images.items():
        rows.append(row(name, count, found["metrics"]["per_site"][name], intervals["per_site"].get(name, {})))
    for column, values in found["subgroups"].items():
        groups = values.items()
        rows.append(None)
        rows += [row(f"{column} = {value}", one["images"], one["metrics"], one["intervals"]) for value, one in groups]
    title = f"{found['model']}, {found['split']} images (95 % intervals)"
    console = Console()
    print_table(("", "images", *names), rows, console=console, whole=1, title=title)
    for name, one in found.get("changes", {}).items():
        chance = f", p = {one['p']:.3g}" if "p" in one else ""
        text = f"{name}: {one['value']:+.3f} ({one['low']:+.3f} to {one['high']:+.3f}{chance})"
        console.print(f"{text} beside {found['against']}", soft_wrap=True)
    for note in found["notes"]:
        console.print(note, soft_wrap=True)


def worth(
    study: Path = typer.Argument(..., help="A study of the method analytic; its sites are simulated."),
    sets: list[str] = SET,
    as_json: bool = typer.Option(False, "--json", help="Print the figures as JSON."),
) -> None:
    """Say what each site adds: leave-one-out and Shapley values, exact up to ten sites, sampled above."""
    from polyclinic.runner.evaluate.inspect import worth as library
    from polyclinic.study import load_study

    found = library(load_study(study, sets))
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        show_worth(found)


def show_worth(found: JsonObject) -> None:
    """The values of each site as a table."""
    from rich.console import Console

    from polyclinic.cli.tables import table_of

    rows = []
    for site, one in found["sites"].items():
        between = f" ({one['low']:.4f} to {one['high']:.4f})" if "low" in one else ""
        rows.append((site, f"{one['leave_one_out']:.4f}", f"{one['shapley']:.4f}{between}"))
    columns, console = ("site", "without it, worse by", "Shapley value"), Console()
    console.print(table_of(columns, rows, title=f"what each site adds: {found['value']}"))
    console.print(f"all sites: {found['all']:.4f}; no site: {found['none']:.4f}; {found['how']}", soft_wrap=True)


def forgetting(
    run: Path = typer.Argument(..., help="The folder of a run of a serial method (cwt, splitnn)."),
    split: str = typer.Option("train", help="Images to look at: train (as in the paper), validation or test."),
    plugins: list[str] = PLUGIN,
    quiet: bool = typer.Option(False, "--quiet", help="Write forgetting.json and forgetting.png, print nothing."),
) -> None:
    """Print each site's score under the model after each hand-over: rows are data, columns the site trained last."""
    from rich.console import Console

    from polyclinic.cli.tables import table_of
    from polyclinic.runner.compare import forgetting as library

    check_choice("--split", split, "train", "validation", "test")
    found = library.matrices(run, split, plugins)
    library.write(found, run)
    for number, matrix in found["rounds"].items() if not quiet else []:
        rows = [(site, *(f"{row[one]:.3f}" if one in row else "-" for one in matrix)) for site, row in matrix.items()]
        title = f"round {number}: {found['metric']} on {split} images after each hand-over"
        Console().print(table_of(("data \\ model", *matrix), rows, title=title))
    if not quiet:
        typer.echo(f"drawn in {run / 'forgetting.png'}")
