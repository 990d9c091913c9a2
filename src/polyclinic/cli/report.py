"""`polyclinic report`: run or comparison as one page; `polyclinic serve`: a folder of runs, or a kit, in a browser."""

import contextlib
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from polyclinic.cli.groups import UNNAMED, DefaultCommand, UnnamedCommand
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.files import check_place

if TYPE_CHECKING:
    from polyclinic.report.serve.server import Listening


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
        [], help="A column of sub-groups (data.columns, subgroup, site); may be repeated.  [default: all kept]"
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


FOLDER = typer.Argument(None, help="The folder with runs and studies; by default the one you are in.")
KIT = typer.Option(None, "--kit", "-k", help="Show a site's kit instead, for the hospital's own people.")


def serve(
    folder: Path | None = FOLDER,
    kit: Path | None = KIT,
    host: str = typer.Option("127.0.0.1", help="The address to listen on; by default this machine alone can reach it."),
    port: int = typer.Option(8642, min=0, max=65535, help="The port; 0 takes any that is free."),
    names: list[str] = typer.Option([], "--name", help="A further name of this machine in the address of a browser."),
) -> None:
    """Watch, compare, start and stop runs in a browser; or decide about studies at a hospital (--kit)."""
    try:
        from polyclinic.report.serve import server
    except ModuleNotFoundError as error:
        raise BadInput(f"serve: needs {error.name}; run `pip install 'polyclinic[serve]'`") from None
    if kit is not None and folder is not None:
        raise BadInput("--kit: shows a kit and no folder; give one of the two")
    place = kit or folder or Path()
    if not place.is_dir():
        raise BadInput(f"{place}: there is no such folder; name one that exists")
    if kit is not None:
        from polyclinic.deployment.site_status import approvals_of

        approvals_of(kit)  # BadInput now if it is no site's kit
    with contextlib.closing((listening := server.listen(host, port, tuple(names))).socket):
        _serve(place.resolve(), listening, is_kit=kit is not None)


def _serve(place: Path, listening: "Listening", *, is_kit: bool) -> None:
    from polyclinic.report.serve import server
    from polyclinic.report.serve.app import folder_app
    from polyclinic.report.serve.jobs import Jobs

    if not server.is_loopback(listening.host):
        typer.echo(f"{listening.host}: others can reach this server, and there is no TLS: trust the network", err=True)
    jobs = Jobs(place)
    if is_kit:
        from polyclinic.report.serve.site_app import site_app

        app = site_app(place, listening.access)
    else:
        app = folder_app(place, listening.access, jobs)
    typer.echo(f"open {listening.address}\nCtrl-C ends the server")
    # whoever asks the process to end means the same as Ctrl-C; by default it would end with its runs still at work
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with contextlib.suppress(KeyboardInterrupt):  # raised or not, as the process was started with SIGINT ignored
            server.make(app).run(sockets=[listening.socket])
        typer.echo("the server has ended", err=True)
    finally:
        for name in jobs.close():
            typer.echo(f"stopped {name}; continue with: polyclinic run --resume --out {place / name}", err=True)
