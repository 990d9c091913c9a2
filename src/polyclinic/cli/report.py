"""`polyclinic report`: a run or a comparison as one page to look at."""

from pathlib import Path

import typer

from polyclinic.cli.groups import UNNAMED, DefaultCommand, UnnamedCommand
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.files import check_place

HELP = """Write a report of a run or a comparison (one HTML file that opens offline, a PDF), or a dossier of a run.

`polyclinic report RUN` writes RUN/report.html. Write ./verify for a folder named verify.
"""
MORE = "`polyclinic report RUN --help` lists the options without a command's name."
app = typer.Typer(name="report", cls=DefaultCommand, help=HELP, epilog=MORE)


@app.command(UNNAMED, hidden=True, cls=UnnamedCommand)
def report(
    folder: Path = typer.Argument(..., metavar="RUN|COMPARISON", help="The folder of a run or of a comparison."),
    pdf: bool = typer.Option(False, "--pdf", help="Write a PDF beside it; no browser is needed."),
    by: list[str] = typer.Option(
        [],
        help="A column for results by sub-group (data.columns, subgroup, site); several are fine.  [default: all kept]",
    ),
    prevalence: float | None = typer.Option(
        None, help="Share of patients with the disease, for PPV and NPV.  [default: that of the test images]"
    ),
    images: bool = typer.Option(True, "--images/--no-images", help="Show a few images of the study."),
    title: str = typer.Option(
        "", help="The title of the report.  [default: name of the images, task and method]", show_default=False
    ),
    out: Path | None = typer.Option(
        None, help="The HTML file to write, or the dossier's folder.  [default: report.html, or dossier, in the folder]"
    ),
    dossier: bool = typer.Option(
        False, "--dossier", help="Write the dossier of a run instead: evidence for whoever decides about a release."
    ),
) -> None:
    """Write report.html: a summary in plain sentences, then charts with a table behind each."""
    if out is not None:
        check_place(out)
    if dossier:
        if pdf or by or prevalence is not None or title:
            raise BadInput("--dossier: takes no --pdf, --by, --prevalence or --title; leave them out")
        from polyclinic.report.dossier import write_dossier

        done = write_dossier(folder, out)
        typer.echo(f"written: {done.folder / 'index.html'} ({done.files} files)")
        typer.echo(f"note this digest elsewhere, for report verify --digest: {done.digest}")
        return
    from polyclinic.report.write import build_report, write_report

    made = build_report(folder, by=by, prevalence=prevalence, images=images, title=title)
    typer.echo(f"written: {' and '.join(map(str, write_report(made, folder, out, pdf=pdf)))}")


@app.command()
def verify(
    dossier: Path = typer.Argument(..., help="The folder of a dossier."),
    digest: str | None = typer.Option(None, help="The digest that was printed when the dossier was written."),
    run: Path | None = typer.Option(None, help="The run folder, to compare evidence and model with."),
) -> None:
    """Read every file and figure of a dossier again, and name every change; exit code 1 if there is one."""
    from polyclinic.report.dossier_check import verify_dossier

    problems = verify_dossier(dossier, digest, run)
    for problem in problems:
        typer.echo(problem)
    if problems:
        raise WorkFailed(f"{dossier}: does not hold: {len(problems)} problem{'s' if len(problems) > 1 else ''}")
    noted = "" if digest else "; without --digest a dossier that somebody wrote anew is not found"
    typer.echo(f"{dossier}: holds{noted}")
