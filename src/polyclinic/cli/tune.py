"""`polyclinic tune`: a search of settings on validation images."""

from __future__ import annotations

from pathlib import Path

import typer

from polyclinic.cli.compare import Bars, check_before_any_starts
from polyclinic.cli.run import SET, STUDY, chosen_study
from polyclinic.files import check_place
from polyclinic.json_types import JsonObject


def tune(
    study: Path | None = STUDY,
    over: list[str] = typer.Option(
        ..., "--over", metavar="TABLE.SETTING=VALUE,VALUE", help="Values to try for a setting; may be repeated."
    ),
    budget: int = typer.Option(..., min=1, help="The most runs of each method, all seeds counted."),
    methods: str = typer.Option("", help="Methods to tune, separated by commas.  [default: the study's]"),
    seeds: int = typer.Option(1, min=1, help="Seeds for each choice of settings, counted up from the study's."),
    out: Path = typer.Option(Path("runs/tuning"), help="The folder for all runs, tuning.json and best.toml."),
    sets: list[str] = SET,
    jobs: int | None = typer.Option(
        None, min=1, help="Runs at a time.  [default: as the cores allow]", show_default=False
    ),
    quiet: bool = typer.Option(False, "--quiet", help="Show no progress."),
    as_json: bool = typer.Option(False, "--json", help="Print tuning.json, and nothing else on stdout."),
) -> None:
    """Search the best settings on validation images; test images are not looked at.

    Every method gets the same budget. All combinations are tried where they fit into it, else some drawn by the seed.
    `--over fedprox:method.mu=0.1,0.01` is for one method. A search that was interrupted goes on where it stopped.
    """
    import json

    from polyclinic.runner.compare import tune as search
    from polyclinic.runner.compare.compare import default_jobs, run_all

    check_place(out / "tuning.json")
    chosen, space = chosen_study(study, sets), search.parse_over(over)
    names = [name.strip() for name in methods.split(",") if name.strip()]
    trials = search.plan(chosen, space, out, budget=budget, methods=names, seeds=seeds)
    planned = [run for trial in trials for run in trial.runs]
    check_before_any_starts(planned, quiet=quiet or as_json)
    with Bars(planned, quiet=quiet or as_json) as bars:
        failed = run_all(planned, out, jobs or default_jobs(chosen), bars.update)
    found = search.summarise(chosen, space, trials, failed, budget=budget, seeds=seeds)
    try:
        search.write(found, chosen, out)
    finally:
        if as_json:
            typer.echo(json.dumps(found))
        else:
            print_table(found)
    if not as_json:
        typer.echo(f"runs, tuning.json, best.toml and best-<method>.toml are in {out}")


def print_table(found: JsonObject) -> None:
    """A row for each trial; a star marks what is chosen."""
    from rich.console import Console

    from polyclinic.cli.tables import table_of
    from polyclinic.runner.compare.compare import words_of
    from polyclinic.runner.compare.tune import sentence

    rows = []
    for row in found["trials"]:
        settings = words_of(row["settings"]) or "as in the study"
        star = "*" if found["methods"][row["method"]].get("chosen") == row["settings"] else ""
        cells = (f"{row['score']:.4f}", f"{row['loss']:.4f}") if "score" in row else ("failed", "-")
        rows.append((row["method"], settings, *cells, star))
    seeds = found["budget"]["seeds"]
    over = f", mean over {seeds} seeds" if seeds > 1 else ""
    title = f"{found['metric']} on validation images ({found['better']} is better){over}"
    columns = ("method", "settings", found["metric"], "loss", "chosen")
    Console().print(table_of(columns, rows, words=("settings",), whole=1, title=title))
    if "privacy" in found:
        typer.echo(sentence(found["privacy"]))
