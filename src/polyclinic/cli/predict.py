"""`polyclinic predict`: what a released model says about images."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from polyclinic.cli.run import PLUGIN
from polyclinic.errors import BadInput

if TYPE_CHECKING:
    from polyclinic.runner.predict import Prediction


def predict(
    model: Path = typer.Argument(..., help="The folder of a finished run, or its model.safetensors."),
    images: list[Path] = typer.Argument(..., help="Images (PNG, JPEG, DICOM, NIfTI, ...) or folders with images."),
    site: str = typer.Option(None, help="Whose model, where each site has one of its own."),
    ensemble: bool = typer.Option(False, "--ensemble", help="All sites' models together: the mean of what they say."),
    out: Path = typer.Option(None, help="Write a CSV file here instead of printing it."),
    masks: Path = typer.Option(None, help="Segmentation: write each mask as a PNG into this folder."),
    plugins: list[str] = PLUGIN,
    allow_import: list[str] = typer.Option(
        [], "--allow-import", help="A module that the model's network or plug-in may be imported from; may be repeated."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object for each image instead of CSV."),
) -> None:
    """Say what a released model sees in images: class and probabilities, a value, or a mask."""
    from polyclinic.runner.predict import load_predictor

    if as_json and out is not None:
        raise BadInput("--json: prints, and --out writes a CSV file; give one of them")
    predictor = load_predictor(model, site=site, ensemble=ensemble, plugins=plugins, allow_import=allow_import)
    dense = predictor.task.dense
    if masks is not None and not dense:
        raise BadInput("--masks: this model does not draw masks; leave it out")
    # all of them before anything is written: an unreadable image in the end must not leave half a file
    found = list(predictor.predict(images))
    if masks is not None:
        _write_masks(found, masks)
    rows = [_row(one) for one in found]
    if as_json:
        typer.echo("\n".join(json.dumps(row) for row in rows))
    elif out is not None:
        out.write_text(_csv(rows), encoding="utf-8", newline="")
    else:
        sys.stdout.write(_csv(rows))


def _row(one: Prediction) -> dict[str, Any]:
    slice_ = {} if one.frame is None else {"slice": one.frame}
    return {"file": str(one.file), **slice_, **one.values}


def _csv(rows: list[dict[str, Any]]) -> str:
    columns = dict.fromkeys(name for row in rows for name in row)
    text = io.StringIO()
    table = csv.DictWriter(text, list(columns), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def _write_masks(found: list[Prediction], folder: Path) -> None:
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for number, one in enumerate(found, 1):
        assert one.mask is not None
        Image.fromarray(one.mask.astype("uint8") * 255).save(folder / f"{number:05d}-{one.file.stem}.png")
