"""`polyclinic study new` writes a commented study, or a paper's; `study check` says what is wrong with one."""

from __future__ import annotations

from pathlib import Path

import typer

from polyclinic.cli.run import SET
from polyclinic.errors import BadInput

app = typer.Typer(help="Write and check studies.", no_args_is_help=True)


@app.command("new")
def new(
    path: Path = typer.Argument(Path("study.toml"), help="The file to write; - for stdout."),
    method: str | None = typer.Option(None, help="The method whose settings to write down.", show_default="fedavg"),
    source: str | None = typer.Option(
        None, help="The data source whose settings to write down.", show_default="fundus-phantom"
    ),
    partition: str | None = typer.Option(
        None, help="The partition whose settings to write down.", show_default="label-skew"
    ),
    task: str | None = typer.Option(None, help="The task; by default the first one the source is for."),
    preset: str | None = typer.Option(
        None, help="A paper's experiment with the paper's own settings, instead of the four above."
    ),
    scale: float = typer.Option(1.0, help="With --preset: images, rounds, epochs and widths so many times smaller."),
    phantom: bool = typer.Option(False, "--phantom", help="With --preset: on drawn images instead of the paper's."),
    list_presets: bool = typer.Option(False, "--list-presets", help="Name the presets, and do nothing else."),
) -> None:
    """Write a study with every setting, its default and what it means; or one of a paper (--preset)."""
    from polyclinic.study.preset import preset as preset_text
    from polyclinic.study.preset import preset_names, summary_of
    from polyclinic.study.template import template

    if list_presets:
        for name in preset_names():
            typer.echo(f"{name:<12}  {summary_of(name)}")
        return
    if preset is None and (phantom or scale != 1):
        raise BadInput("--scale and --phantom go with --preset; `polyclinic study new --list-presets` names them")
    if preset is not None and any(one is not None for one in (method, source, partition, task)):
        raise BadInput("--preset: has a method, a source, a partition and a task of its own; leave these flags out")
    if preset is not None:
        text = preset_text(preset, scale=scale, phantom=phantom).replace("STUDY", str(path))
    else:
        text = template(
            method=method or "fedavg",
            source=source or "fundus-phantom",
            partition=partition or "label-skew",
            task=task,
        )
    write_new(path, text)


def write_new(path: Path, text: str) -> None:
    """Write a new study, or print it where the path is `-`; BadInput if there is a file already."""
    if str(path) == "-":
        typer.echo(text)
        return
    if path.exists():
        raise BadInput(f"{path}: exists already; name another file")
    if not path.parent.is_dir():
        raise BadInput(f"{path}: there is no folder {path.parent}; make it first")
    path.write_text(text, encoding="utf-8")
    typer.echo(f"wrote {path}; run it with: polyclinic run {path}")


@app.command("check")
def check(path: Path = typer.Argument(..., help="The study, a TOML file."), sets: list[str] = SET) -> None:
    """Say whether a study can run, without running it.

    Images are opened only where they decide: for data.fold, data.test_per_class, data.test_total_per_class, and for a
    file of first weights.
    """
    from polyclinic.runner.files_check import check_files
    from polyclinic.study import load_study

    study = load_study(path, sets)
    if study.tuning is not None and study.data.source != "at-sites":
        study.tuning.check_weights()
    found = check_files(study)
    sites = len(study.sites.site_names()) or "as many as the data has"
    typer.echo(
        f"{path}: fine. {study.method.name} for {study.task.name} on {study.data.source}, "
        f"sites: {sites}, rounds: {study.method.rounds}"
    )
    for sentence in found:
        typer.echo(sentence)
