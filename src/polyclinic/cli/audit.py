"""`polyclinic audit`: attack the parcels that the sites of a run kept, and say what they give away."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import typer

from polyclinic.cli.run import PLUGIN
from polyclinic.errors import BadInput

BUDGET = typer.Option(
    "quick",
    help="How much is tried: quick (10 minutes at most), standard (2 hours at most) or thorough (as long as it takes).",
)
FEATURES = typer.Option(
    "pixels", help="What images are compared by: pixels, efficientnet-lite0, lpips-alex or lpips-vgg."
)


def audit(
    run: Path = typer.Argument(..., help="A run folder whose study has the table [audit]; at a site, KIT/runs/NAME."),
    budget: str = BUDGET,
    features: str = FEATURES,
    kinds: str = typer.Option("", help="Only parcels of these kinds, separated by commas."),
    sites: str = typer.Option("", help="Only parcels of these sites, separated by commas."),
    grid: bool = typer.Option(False, "--grid", help="Run and audit the study with each defence: leakage and utility."),
    device: str = typer.Option("auto", help="cpu, cuda, ...; auto takes a GPU where there is one."),
    study: Path | None = typer.Option(None, help="The run's study, at a site whose kit does not have it any more."),
    plugins: list[str] = PLUGIN,
    trajectory: str = typer.Option(
        "", help="Steps of a gradient inversion to keep and draw, separated by commas, such as 0,10,100."
    ),
    coordinator: bool = typer.Option(
        False, "--coordinator", help="Also rehearse a coordinator that sends crafted weights to a site of this run."
    ),
    quiet: bool = typer.Option(False, "--quiet", help="Write audit.json and pictures, print nothing."),
    as_json: bool = typer.Option(False, "--json", help="Print audit.json, and nothing else on stdout."),
) -> None:
    """Attack what left the sites of a run; target beside reconstruction, and a verdict for each kind of parcel.

    `polyclinic audit update` and `polyclinic audit images` attack what other programs made: see their --help. A RUN
    that is called like one of them is written ./update.
    """
    from polyclinic.cli.audit_table import show_verdicts
    from polyclinic.study.audit_settings import EFFORTS

    if budget not in EFFORTS:
        raise BadInput(f"--budget: no such choice: '{budget}'; choose quick, standard or thorough")
    if grid and (kinds or sites or study or trajectory or coordinator or features != "pixels"):
        raise BadInput(
            "--grid: attacks every variation alike; leave --kinds, --sites, --features, --study, "
            "--trajectory and --coordinator out"
        )
    display = None if quiet or as_json else AuditProgress()
    show_progress = display.show if display else None
    options: dict[str, Any] = {"budget": budget, "device": device, "plugins": plugins, "progress": show_progress}
    if not grid:
        options |= {"features": features, "kinds": _names(kinds), "sites": _names(sites), "study": study}
        options |= {"trajectory": _steps(trajectory), "coordinator": coordinator}
    report = _report(run, grid, options, display)
    if as_json:
        typer.echo(json.dumps(report))
    elif not quiet:
        show_grid(report, run) if grid else show_verdicts(report, run)


def _report(run: Path, grid: bool, options: dict[str, Any], display: AuditProgress | None) -> dict[str, Any]:
    from polyclinic.audits.audit import audit as audit_run
    from polyclinic.audits.grid import grid as grid_of_run
    from polyclinic.progress import listening

    report, begun = run / ("grid.json" if grid else "audit.json"), time.time()
    try:
        with listening(display.working) if display else contextlib.nullcontext():
            return grid_of_run(run, **options) if grid else audit_run(run, **options)
    except KeyboardInterrupt:
        typer.echo(f"interrupted; {_so_far(report, begun)}", err=True)
        raise typer.Exit(1) from None
    finally:
        if display:
            display.close()


def _so_far(report: Path, begun: float) -> str:
    """Whether an interrupted audit has left something: an older report is an earlier audit's."""
    found = report.is_file() and report.stat().st_mtime >= begun
    return f"what was found so far is in {report}" if found else "nothing was found yet"


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _steps(text: str) -> list[int]:
    if not all(step.isdecimal() for step in _names(text)):
        raise BadInput(f"--trajectory: '{text}' is no list of whole numbers; write steps such as 0,10,100")
    return [int(step) for step in _names(text)]


class AuditProgress:
    """Progress on stderr: a bar in a terminal, a line for each parcel elsewhere."""

    def __init__(self) -> None:
        from rich.console import Console

        from polyclinic.cli.display import InnerProgress, progress_bars

        self.console = Console(stderr=True)
        self.inner = InnerProgress(self.console)
        self.bars = progress_bars(self.console) if self.console.is_terminal else None
        self._task: Any = None
        self._begun = time.monotonic()

    def show(self, what: str, done: int, total: int) -> None:
        if self.bars is None:
            print(f"audit: {done} of {total} {what} ({time.monotonic() - self._begun:.0f} s)", file=sys.stderr)
            return
        if self._task is None:
            self.bars.start()
            self._task = self.bars.add_task("audit", total=total, note="")
        self.bars.update(self._task, completed=done, total=total, note=what)

    def working(self, what: str, done: int, total: int) -> None:
        self.inner.show(self.bars, what, done, total)

    def close(self) -> None:
        if self.bars is not None:
            self.bars.stop()


def show_grid(report: dict[str, Any], run: Path) -> None:
    """Utility and leakage of each defence."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="what defences cost and what they help against")
    for column in ("defence", report["metric"], "PSNR", "guess", "recovered", "told", "verdict"):
        table.add_column(column, justify="left" if column in ("defence", "verdict") else "right", overflow="fold")
    for one in report["points"]:
        figures = [_figure(one[name], digits) for name, digits in (("utility", 3), ("psnr", 1), ("psnr_of_guess", 1))]
        counts = [f"{one[name]} of {one['images']}" for name in ("recovered", "told")]
        table.add_row(one["defence"], *figures, *counts, one["verdict"])
    Console().print(table)
    drawn = f"drawn in {run / 'grid.png'}, " if (run / "grid.png").exists() else ""
    typer.echo(f"{drawn}figures in {run / 'grid.json'}")


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
