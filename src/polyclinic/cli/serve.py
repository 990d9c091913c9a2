"""`polyclinic serve`: a folder of runs, or a hospital's kit, as a local web page."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from polyclinic.errors import BadInput

if TYPE_CHECKING:
    from polyclinic.report.serve.server import Listening

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


def _serve(place: Path, listening: Listening, *, is_kit: bool) -> None:
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
