"""`polyclinic audit`: attack the parcels that the sites of a run kept, and say what they give away.

`audit update` and `audit images` attack what other programs made.
"""

import contextlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from polyclinic.cli.groups import UNNAMED, DefaultCommand, UnnamedCommand
from polyclinic.cli.run import PLUGIN, check_choice
from polyclinic.errors import BadInput
from polyclinic.files import check_place

if TYPE_CHECKING:
    from polyclinic.cli.display import RunDisplay

BUDGET = typer.Option(
    "quick",
    help="How much is tried: quick (10 minutes at most), standard (2 hours at most) or thorough (as long as it takes).",
)
FEATURES = typer.Option("pixels", help="How images are compared: pixels, efficientnet-lite0, lpips-alex or lpips-vgg.")

OUT = typer.Option(Path("audit"), help="The folder for audit.json and pictures, which show images.")
JSON = typer.Option(False, "--json", help="Print audit.json, and nothing else on stdout.")


class AuditCommands(DefaultCommand):
    """`polyclinic audit --help` is the help of `polyclinic audit RUN`, which names the other two."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [UNNAMED, *args] if args[:1] == ["--help"] else args)


app = typer.Typer(name="audit", cls=AuditCommands, help="Attack what left the sites, an update, or synthetic images.")


@app.command(UNNAMED, hidden=True, cls=UnnamedCommand)
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
    patients: bool = typer.Option(
        False, "--patients", help="Also test every single patient, with 64 reference runs (256 with --budget thorough)."
    ),
    epsilon: bool = typer.Option(
        False, "--epsilon", help="Also bound epsilon from below, by canaries in a site's private training."
    ),
    quiet: bool = typer.Option(False, "--quiet", help="Write audit.json and pictures, print nothing."),
    as_json: bool = typer.Option(False, "--json", help="Print audit.json, and nothing else on stdout."),
) -> None:
    """Attack what left the sites of a run; target beside reconstruction, and a verdict for each kind of parcel.

    `polyclinic audit update` and `polyclinic audit images` attack what other programs made: see their --help. A RUN
    that is called like one of them is written ./update.
    """
    from polyclinic.cli.display import RunDisplay
    from polyclinic.cli.tables import show_grid, show_verdicts

    check_choice("--budget", budget, "quick", "standard", "thorough")
    if grid and (kinds or sites or study or trajectory or coordinator or patients or epsilon or features != "pixels"):
        flags = "--kinds, --sites, --features, --study, --trajectory, --coordinator, --epsilon and --patients"
        raise BadInput(f"--grid: attacks every variation alike; leave {flags} out")
    display = None if quiet or as_json else RunDisplay()
    options: dict[str, Any] = {"budget": budget, "device": device, "plugins": plugins}
    if not grid:
        options |= {"features": features, "kinds": _names(kinds), "sites": _names(sites), "study": study}
        options |= {"trajectory": _steps(trajectory), "coordinator": coordinator}
        options |= {"patients": patients, "epsilon": epsilon}
    report = _report(run, grid, options, display)
    if as_json:
        typer.echo(json.dumps(report))
    elif not quiet:
        show_grid(report, run) if grid else show_verdicts(report, run)


def _report(run: Path, grid: bool, options: dict[str, Any], display: "RunDisplay | None") -> dict[str, Any]:
    from polyclinic.audits.audit import audit as audit_run
    from polyclinic.audits.grid import grid as grid_of_run
    from polyclinic.progress import listening

    report, begun = run / ("grid.json" if grid else "audit.json"), time.time()
    work = grid_of_run if grid else audit_run
    try:
        with listening(display.working) if display else contextlib.nullcontext():
            return work(run, progress=display.auditing if display else None, **options)
    except KeyboardInterrupt:
        found = report.is_file() and report.stat().st_mtime >= begun  # an older report is an earlier audit's
        words = f"what was found so far is in {report}" if found else "nothing was found yet"
        typer.echo(f"interrupted; {words}", err=True)
        raise typer.Exit(1) from None
    finally:
        if display:
            display.close()


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _steps(text: str) -> list[int]:
    if not all(step.isdecimal() for step in _names(text)):
        raise BadInput(f"--trajectory: '{text}' is no list of whole numbers; write steps such as 0,10,100")
    return [int(step) for step in _names(text)]


@app.command()
def update(
    before: Path = typer.Option(..., help="Weights before the site trained: safetensors, npz or a torch file."),
    after: Path | None = typer.Option(None, help="Weights that the site sent."),
    change: Path | None = typer.Option(None, help="Instead of --after: the difference of weights that the site sent."),
    model: str = typer.Option(..., help="A backbone by name, or any network as package.module:callable."),
    images: Path = typer.Option(..., help="The images that the site trained with; sub-folders are classes."),
    settings: str = typer.Option(..., help="How it trained, such as lr=0.1,steps=1,batch=8,optimizer=sgd."),
    held_out: Path | None = typer.Option(None, "--held-out", help="Images of other patients, to compare with."),
    budget: str = BUDGET,
    device: str = typer.Option("cpu", help="cpu, cuda, ..."),
    out: Path = OUT,
    as_json: bool = JSON,
) -> None:
    """Attack an update that Flower, NVFlare, FL4Health, MONAI or plain PyTorch saved: can images be recovered?"""
    from polyclinic.audits.external import audit_update
    from polyclinic.audits.external_files import Sent, parse_settings

    check_place(out)
    check_choice("--budget", budget, "quick", "standard", "thorough")
    if (after is None) == (change is None):
        raise BadInput("--after: name the weights that the site sent, or with --change the difference; one of the two")
    known = parse_settings(settings)
    options: dict[str, Any] = {"settings": known, "held_out": held_out, "budget": budget, "device": device}
    sent = Sent(after, "--after") if after else Sent(change, "--change")  # type: ignore[arg-type]
    show_or_print(audit_update(before, sent, model, images, out, **options), out, as_json)


@app.command()
def images(
    synthetic: Path = typer.Argument(..., help="A folder with the images that a generator made."),
    training: Path = typer.Option(..., help="The images that it was trained on."),
    held_out: Path = typer.Option(..., "--held-out", help="Images of other patients, 20 or more."),
    budget: str = BUDGET,
    out: Path = OUT,
    as_json: bool = JSON,
) -> None:
    """Search images of a generator for copies of its training images, and for signs of who was trained on."""
    from polyclinic.audits.external import audit_images

    check_place(out)
    check_choice("--budget", budget, "quick", "standard", "thorough")
    show_or_print(audit_images(synthetic, training, held_out, out, budget=budget), out, as_json)


@app.command()
def predictions(
    table: Path = typer.Argument(..., help="A CSV file with a row for each image: probabilities, scores, embeddings."),
    column: str = typer.Option("site", help="The column that the numbers may betray."),
    patient: str | None = typer.Option(None, help="The column that names patients, who are permuted as a whole."),
    as_json: bool = JSON,
) -> None:
    """Test whether outputs betray the hospital, or another column, and what rounding would mend it."""
    from polyclinic.audits.predictions import audit_predictions

    found = audit_predictions(table, column, patient)
    typer.echo(json.dumps(found) if as_json else f"{found['verdict']}: {found['words']}")


def show_or_print(report: dict[str, Any], out: Path, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report))
        return
    from polyclinic.cli.tables import show_findings

    show_findings(report, out)
