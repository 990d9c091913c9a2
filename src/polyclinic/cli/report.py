"""`polyclinic report`: a run or a comparison as one page to look at."""

from __future__ import annotations

from pathlib import Path

import typer

from polyclinic.cli.default_command import DefaultCommand

HELP = """Write a report of a run or a comparison: one HTML file that opens offline, and a PDF.

`polyclinic report RUN` writes RUN/report.html. A RUN that is called like a command: ./verify.
"""
app = typer.Typer(cls=DefaultCommand, help=HELP)


@app.command("default", hidden=True)
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
    out: Path | None = typer.Option(None, help="The HTML file to write.  [default: report.html in the folder]"),
) -> None:
    """Write report.html: a summary in plain sentences, then charts with a table behind each."""
    from polyclinic.report.write import write_report

    written = write_report(folder, out=out, pdf=pdf, by=by, prevalence=prevalence, images=images)
    typer.echo(f"written: {written.html}" + (f" and {written.pdf}" if written.pdf else ""))
