"""`polyclinic start`: from a folder of images to a model and its report, with one question at most."""

import contextlib
import sys
from pathlib import Path

import typer

from polyclinic.cli.run import run
from polyclinic.cli.study import check_sentences, write_for
from polyclinic.errors import BadInput
from polyclinic.files import check_place


def start(
    images: Path = typer.Argument(..., metavar="FOLDER", help="Your images: a folder, a CSV or an npz file."),
    out: Path | None = typer.Option(
        None, help="The folder for study, model and report.  [default: runs/<name of the images>]", show_default=False
    ),
    yes: bool = typer.Option(False, "--yes", help="Train without a question."),
) -> None:
    """Look at your images, write a study for them, check it, train, and write a report.

    The same as study new --for, study check, run and report. A study that is there already is taken as it is.
    """
    folder = out or Path("runs") / (images.resolve().stem or "images")
    study, trained = folder / "study.toml", folder / "run"
    if (trained / "result.json").is_file():
        raise BadInput(f"{trained}: holds a run that has ended; see its report.html, or name another folder with --out")
    if not study.is_file():
        check_place(study)
        made = [one for one in (folder, *folder.parents) if not one.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        try:
            write_for(images, study, {})
        except BaseException:
            with contextlib.suppress(OSError):  # it holds something
                for one in made:
                    one.rmdir()
            raise
    for sentence in check_sentences(study, [], images=True):
        typer.echo(sentence)
    if not yes and sys.stdin.isatty() and not typer.confirm("Train with this study now?", default=True):
        typer.echo(f"change {study} as you like, then again: polyclinic start {images} --out {folder}")
        return
    begun = (trained / "study.toml").exists()
    run(study, [], trained, resume=begun, engine=None, address=None, report=True, quiet=False, as_json=False)
    typer.echo(f"new images: polyclinic predict {trained} IMAGES")
