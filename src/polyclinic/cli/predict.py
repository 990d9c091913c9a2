"""`polyclinic predict`: what a released model says about images; `polyclinic export`: the model for other programs."""

import csv
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from polyclinic.cli.run import ALLOW_IMPORT, ENSEMBLE, PLUGIN, SITE, check_choice
from polyclinic.errors import BadInput
from polyclinic.files import atomic_write, check_place


def predict(
    model: Path = typer.Argument(..., help="The folder of a finished run, or its model.safetensors."),
    images: list[Path] = typer.Argument(
        ..., help="Images (PNG, JPEG, DICOM, NIfTI, ..., an npz file) or folders with images."
    ),
    site: str = SITE,
    ensemble: bool = ENSEMBLE,
    out: Path = typer.Option(None, help="Write a CSV file here instead of printing it."),
    masks: Path = typer.Option(
        None, help="Segmentation: write masks in the images' own size into this folder (PNG, NIfTI, DICOM SEG)."
    ),
    coverage: float = typer.Option(
        0.9, help="How often a set of classes or an interval holds the truth: 0.8, 0.9, 0.95."
    ),
    specificity: float = typer.Option(
        None, help="Two classes: call an image positive at the threshold with this specificity: 0.9, 0.95."
    ),
    coarse: float = typer.Option(
        None, help="Round numbers to multiples of this, such as 0.1: `audit predictions` says what is needed."
    ),
    slices: str = typer.Option(None, help="Slices of a volume: middle or all; if not given, as in training."),
    strict: bool = typer.Option(False, "--strict", help="Stop at a file that cannot be read, instead of skipping it."),
    plugins: list[str] = PLUGIN,
    allow_import: list[str] = ALLOW_IMPORT,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object for each image instead of CSV."),
) -> None:
    """Say what a released model sees in images: class and probabilities, a value, or a mask."""
    from polyclinic.runner.evaluate.calibration import case_count
    from polyclinic.runner.predict.masks import write_masks
    from polyclinic.runner.predict.predict import load_predictor, other_kind
    from polyclinic.runner.predict.volumes import write_volume_masks

    if as_json and out is not None:
        raise BadInput("--json: prints, and --out writes a CSV file; give one of them")
    for flag, place in (("--out", out), ("--masks", masks)):
        if place is not None:
            check_place(place, flag)
    if coarse is not None and not coarse > 0:
        raise BadInput(f"--coarse {coarse:g}: must be a number above 0, such as 0.1")
    check_choice("--slices", "middle" if slices is None else slices, "middle", "all")
    predictor = load_predictor(model, site=site, ensemble=ensemble, plugins=plugins, allow_import=allow_import)
    if masks is not None and not predictor.task.dense:
        raise BadInput("--masks: this model does not draw masks; leave it out")
    if masks is not None and predictor.card.graham:
        raise BadInput("--masks: this model's preparation (graham) moves pixels, so masks fit no image; leave it out")
    skipped: list[Path] = []

    def skip(file: Path, reason: str) -> None:
        skipped.append(file)
        typer.echo(f"{file}: {reason}; skipped", err=True)

    # all of them before anything is written: with --strict an unreadable image must not leave half a file
    wanted: Any = {"coverage": coverage, "specificity": specificity, "slices": slices}
    found = list(predictor.predict(images, **wanted, on_bad_file=None if strict else skip))
    if not found:
        raise BadInput(f"images: none of the {len(skipped)} files can be read; name other files")
    if masks is not None:
        volume = predictor.card.volume
        _write(
            masks, lambda: write_volume_masks(found, masks, volume.structures) if volume else write_masks(found, masks)
        )
    if any(one.frame is not None and one.file.suffix.lower() != ".npz" for one in found):
        trained = predictor.card.slices
        if slices == "all" and trained != "all":
            which = "the middle slice of each volume" if trained == "middle" else f"slices {trained} of each volume"
            said = "on other slices its answers are less sure than the test scores say"
            cure = 'Train it with data.slices = "all" for them'
            typer.echo(f"--slices all: this model learnt from {which}; {said}. {cure}", err=True)
    cases = case_count(model, site) if len(predictor.model.networks) == 1 else None
    for said in filter(None, (predictor.why_no_set(coverage, cases, site), other_kind(found))):
        typer.echo(said, err=True)
    rows = []
    for one in found:
        part = {} if one.frame is None else {"image" if one.file.suffix.lower() == ".npz" else "slice": one.frame}
        rows.append({"file": str(one.file), **part, **(coarser(one.values, coarse) if coarse else one.values)})
    if as_json:
        typer.echo("\n".join(json.dumps(row) for row in rows))
    elif out is not None:
        _write(out, lambda: atomic_write(out, _csv(rows)))
        typer.echo(f"wrote {out}: {len(rows)} image{'s' * (len(rows) > 1)}", err=True)
    else:
        sys.stdout.write(_csv(rows))


def coarser(values: dict[str, Any], step: float) -> dict[str, Any]:
    """The same row with its numbers rounded to multiples of `step`."""
    return {name: round(round(one / step) * step, 6) if isinstance(one, float) else one for name, one in values.items()}


def _write(target: Path, write: Callable[[], object]) -> None:
    try:
        write()
    except OSError as error:
        raise BadInput(f"{target}: cannot be written ({error.strerror or error}); name another place") from None


def _csv(rows: list[dict[str, Any]]) -> str:
    """Names of classes and files are somebody's texts: none becomes a formula of a spreadsheet."""
    from polyclinic.report.blocks import harmless
    from polyclinic.runner.predict.predict import BETWEEN

    columns = dict.fromkeys(name for row in rows for name in row)
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(map(harmless, columns))
    for row in rows:
        cells = [row.get(name, "") for name in columns]
        table.writerow(harmless(BETWEEN.join(cell) if isinstance(cell, list) else cell) for cell in cells)
    return text.getvalue()


def export(
    run: Path = typer.Argument(..., help="The folder of a finished run, or its model.safetensors."),
    to: str = typer.Option(..., "--to", help="The format: onnx, torchscript or monai-bundle."),
    out: Path = typer.Option(None, help="A new folder; by default exported/<format> in the run folder."),
    images: list[Path] = typer.Option(
        [], "--images", help="Images, or a folder, to compare predictions on; drawn ones if not given. May be repeated."
    ),
    site: str = SITE,
    ensemble: bool = ENSEMBLE,
    plugins: list[str] = PLUGIN,
    allow_import: list[str] = ALLOW_IMPORT,
) -> None:
    """Write a released model as ONNX, TorchScript or a MONAI bundle, with its preparation and its model card."""
    from polyclinic.runner.export import export as library

    if out is not None:
        check_place(out)
    chosen: Any = {"site": site, "ensemble": ensemble, "plugins": plugins, "allow_import": allow_import}
    done = library.export(run, to, out, images=images, **chosen)
    agreement = done.agreement
    typer.echo(f"{done.file}: written; the model card and the preparation lie beside it")
    typer.echo(
        f"predictions agree to {max(agreement.largest_difference, agreement.each_alone):.1e} on {agreement.what} "
        f"(allowed: {agreement.tolerance:g})"
    )
