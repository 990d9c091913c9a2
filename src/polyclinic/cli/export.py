"""`polyclinic export`: a released model for other programs."""

from __future__ import annotations

from pathlib import Path

import typer

from polyclinic.cli.predict import ALLOW_IMPORT
from polyclinic.cli.run import PLUGIN


def export(
    run: Path = typer.Argument(..., help="The folder of a finished run, or its model.safetensors."),
    to: str = typer.Option(..., "--to", help="The format: onnx, torchscript or monai-bundle."),
    out: Path = typer.Option(None, help="A new folder; by default exported/<format> in the run folder."),
    images: list[Path] = typer.Option(
        [], "--images", help="Images, or a folder, to compare predictions on; drawn ones if not given. May be repeated."
    ),
    site: str = typer.Option(None, help="The site whose model is used, where each site has its own model."),
    ensemble: bool = typer.Option(
        False, "--ensemble", help="Use the models of all sites: the mean of their predictions."
    ),
    plugins: list[str] = PLUGIN,
    allow_import: list[str] = ALLOW_IMPORT,
) -> None:
    """Write a released model as ONNX, TorchScript or a MONAI bundle, with its preparation and its model card."""
    from polyclinic.runner.export import export as library

    done = library.export(
        run, to, out, images=images, site=site, ensemble=ensemble, plugins=plugins, allow_import=allow_import
    )
    agreement = done.agreement
    typer.echo(f"{done.file}: written; model_card.md and preparation/ lie beside it")
    typer.echo(
        f"predictions agree to {max(agreement.largest_difference, agreement.each_alone):.1e} on {agreement.what} "
        f"(allowed: {agreement.tolerance:g})"
    )
