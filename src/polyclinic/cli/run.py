"""`polyclinic run`: run one study into a folder, or resume it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from polyclinic.errors import BadInput, WorkFailed

if TYPE_CHECKING:
    from polyclinic.study import Study

STUDY = typer.Argument(None, help="The study, a TOML file; without one the embedded default.", show_default=False)
SET = typer.Option([], "--set", metavar="TABLE.SETTING=VALUE", help="Change a setting of the study; may be repeated.")

SITE = typer.Option(None, help="The site whose model is used, where each site has its own model.")
ENSEMBLE = typer.Option(False, "--ensemble", help="Use the models of all sites: the mean of their predictions.")
ALLOW_IMPORT = typer.Option(
    [], "--allow-import", help="A module that the model's network or plug-in may be imported from; may be repeated."
)
PLUGIN = typer.Option(
    [],
    "--plugin",
    help="A plug-in of the run that has moved since: its file or module; name all of them, in the study's order. "
    "No plug-in file is loaded that is not named here.",
)


def run(
    study: Path | None = STUDY,
    sets: list[str] = SET,
    out: Path | None = typer.Option(
        None, help="The run folder.  [default: runs/<method>-seed<seed>]", show_default=False
    ),
    resume: bool = typer.Option(False, "--resume", help="Continue the run that was begun in the folder."),
    engine: str | None = typer.Option(None, help="in-process, ray or nvflare.", show_default=False),
    address: str | None = typer.Option(None, help="A Ray cluster to run on, with --engine ray.", show_default=False),
    report: bool | None = typer.Option(
        None,
        "--report/--no-report",
        help="Write report.html at the end, without pictures of images.  [default: yes; no with --quiet or --json]",
        show_default=False,
    ),
    quiet: bool = typer.Option(False, "--quiet", help="Show no progress and no scores; result.json has them."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON, and nothing else on stdout."),
) -> None:
    """Run one study and write its result folder."""
    from polyclinic.cli.display import RunDisplay
    from polyclinic.runner.run.recorder import Display, LiveFile
    from polyclinic.runner.run.run import default_folder
    from polyclinic.runner.run.run import run as run_study
    from polyclinic.study.unused import notice_ignored

    sets = [*sets, *(f"engine.{name}={value}" for name, value in (("name", engine), ("address", address)) if value)]
    chosen = chosen_study(study, sets, out if resume else None)
    if not resume:  # said when it began; and a comparison, which begins its runs so, is of methods that differ
        notice_ignored(chosen)
    display = Display() if quiet or as_json else RunDisplay()
    folder = out or default_folder(chosen)
    was_over = (folder / "result.json").exists()
    live = LiveFile(folder, display)
    try:
        result = run_study(chosen, out, resume=resume, display=live)
    except KeyboardInterrupt:
        typer.echo(f"interrupted; continue with: polyclinic run --resume --out {folder}", err=True)
        raise typer.Exit(1) from None
    finally:
        live.remove()
        if isinstance(display, RunDisplay):
            display.close()
    if as_json:
        typer.echo(json.dumps(result.values))
    elif not quiet:
        from polyclinic.cli.tables import print_result

        print_result(result, shown=display.warnings if isinstance(display, RunDisplay) else ())
    if report or (report is None and not (quiet or as_json or was_over)):
        write_page(folder, to_stderr=as_json)


def write_page(folder: Path, *, to_stderr: bool = False) -> None:
    """Write `report.html` into a run folder, without pictures of images; a hint where it cannot be: the run is over."""
    from polyclinic.extras import is_installed, missing_sentence

    if not is_installed("matplotlib"):
        typer.echo(f"no report was written: {missing_sentence('matplotlib', 'it')}", err=True)
        return
    from polyclinic.report.write import build_report, write_report

    try:
        (file,) = write_report(build_report(folder, images=False), folder)
        typer.echo(f"report: {file}; with pictures of images: polyclinic report {folder}", err=to_stderr)
    except (BadInput, WorkFailed) as error:
        typer.echo(f"no report was written: {error}", err=True)


def check_choice(flag: str, value: str, *choices: str) -> None:
    """BadInput for a value of a flag that is not among its choices."""
    if value not in choices:
        from polyclinic.settings import no_such_choice

        raise BadInput(f"{flag}: {no_such_choice(value, list(choices))}")


def chosen_study(path: Path | None, sets: list[str], begun: Path | None = None) -> "Study":
    """The study of a file, of a run folder that was begun, or the embedded default; with `--set`s on top."""
    from polyclinic.study import load_run_study, load_study
    from polyclinic.study.reading import load_default

    if path is not None and path.is_dir():
        cure = f"of your own images: polyclinic study new study.toml --for {path}"
        if (path / "study.toml").is_file():
            cure = f"to go on with this run: polyclinic run --resume --out {path}"
        raise BadInput(f"{path}: is a folder, and a study is a TOML file; {cure}")
    if path is not None:
        return load_study(path, sets)
    if begun is not None:
        if not (begun / "study.toml").exists():
            raise BadInput(f"--out {begun}: holds no run to resume; leave out --resume to begin one")
        return load_run_study(begun, sets)
    return load_default(sets)
