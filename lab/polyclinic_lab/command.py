"""`polyclinic reproduce`: check a claim of one of the papers, or of our own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from polyclinic.errors import BadInput
from polyclinic.files import check_place

if TYPE_CHECKING:
    from polyclinic_lab.claim import Claim
    from polyclinic_lab.records import Kept

#: columns of --list: dates and the longest words are not cut off at 80
NARROWEST = {"where": 15, "quick": 10, "full": 10}


def reproduce(
    claim: str = typer.Argument("", help="The claim to check; --list shows all.", show_default=False),
    listed: bool = typer.Option(False, "--list", help="Show all claims with their last verdicts, and run nothing."),
    scale: str = typer.Option("quick", help="quick (two cores, at most 15 minutes) or full (a GPU)."),
    seeds: int | None = typer.Option(
        None, min=1, help="Runs of each row, a seed each.  [default: the claim's]", show_default=False
    ),
    out: Path | None = typer.Option(None, help="The folder for runs, claim.json and claim.png."),
    runs: Path | None = typer.Option(
        None, help="A folder of runs that claims share, so that none is made twice.  [default: DIR of --out]"
    ),
    phantom: bool = typer.Option(False, "--phantom", help="Take phantoms in place of real images."),
    jobs: int | None = typer.Option(
        None, min=1, help="Runs at a time.  [default: as the cores allow]", show_default=False
    ),
    quiet: bool = typer.Option(False, "--quiet", help="Show no progress."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON, and nothing else on stdout."),
) -> None:
    """Run the studies of a claim and judge it by its rule; what was interrupted goes on where it stopped."""
    from polyclinic_lab.claim import CLAIMS, SCALES, find_claim

    if listed:
        show_list(list(CLAIMS.values()), as_json=as_json)
        return
    if not claim:
        raise BadInput("CLAIM: name a claim to check; `polyclinic reproduce --list` shows all")
    if scale not in SCALES:
        raise BadInput(f"--scale {scale}: choose quick or full")
    chosen = find_claim(claim)
    if out is None:
        raise BadInput(f"--out: name a folder for the runs, such as runs/{claim}")
    check_place(out / "claim.json")
    found = _run(
        chosen, out, {"scale": scale, "seeds": seeds, "phantom": phantom, "jobs": jobs, "runs": runs}, quiet or as_json
    )
    if as_json:
        typer.echo(json.dumps(found))
    else:
        show(found, out)


def _run(claim: Claim, out: Path, options: dict[str, Any], quiet: bool) -> dict[str, Any]:
    from polyclinic.cli.compare import watched
    from polyclinic_lab import judge

    arms = judge.plan(claim, out, options["scale"], options["seeds"], phantom=options["phantom"], runs=options["runs"])
    with watched([entry for arm in arms.values() for entry in arm], quiet=quiet) as update:
        return judge.reproduce(claim, out, watch=update, **options)


def show_list(claims: list[Claim], *, as_json: bool) -> None:
    """A line for each claim: where it stands, what it says, how long it takes, what came of it last."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from polyclinic_lab.claim import SCALES
    from polyclinic_lab.records import last_verdict, minutes_of, records
    from polyclinic_lab.two_cores import minutes_on_two_cores, two_cores

    kept, times = records(), two_cores()
    if as_json:
        typer.echo(json.dumps([_entry(claim, kept, times) for claim in claims]))
        return
    title = f"{len(claims)} claims; minutes: quick on two cores, full on a GPU; ~ is an estimate"
    table = Table(title=title, box=SIMPLE, padding=0)
    for name in ("claim", "where", "two\ncores", "GPU", "quick", "full"):
        table.add_column(name, no_wrap=name == "claim", overflow="fold", min_width=NARROWEST.get(name))
    for claim in claims:
        minutes = minutes_on_two_cores(claim, times), minutes_of(claim, "full", kept)
        verdicts = [last_verdict(claim.name, kept, scale) for scale in SCALES]
        table.add_row(claim.name, f"{claim.paper}, {claim.place}", *minutes, *verdicts)
    Console().print(table)
    typer.echo("reproduce CLAIM --out DIR runs one; --list --json has sentences and rules")


def _entry(claim: Claim, kept: Kept, times: dict[str, dict[str, Any]]) -> dict[str, Any]:
    from polyclinic_lab.claim import SCALES
    from polyclinic_lab.records import last_verdict, minutes_of

    return {
        "claim": claim.name,
        "paper": claim.paper,
        "place": claim.place,
        "sentence": claim.sentence,
        "numbers": [vars(number) for number in claim.numbers],
        "data": {"paper": claim.paper_data, "ours": claim.our_data},
        "rule": claim.rule.words,
        "post_hoc": claim.post_hoc,
        "minutes": {scale: {name: claim.minutes[scale].get(name) for name in ("cpu", "gpu")} for scale in SCALES},
        "two_cores": times.get(claim.name),
        "minutes_of_runs": {scale: minutes_of(claim, scale, kept) for scale in SCALES},
        "last": {scale: last_verdict(claim.name, kept, scale) for scale in SCALES},
    }


def show(found: dict[str, Any], out: Path) -> None:
    """The paper's numbers beside ours, and the verdict."""
    from rich.console import Console
    from rich.table import Table

    theirs = {(row["label"], row["metric"]): row["mean"] for row in found["paper_numbers"]}
    table = Table(title=f"{found['paper']}, {found['place']}")
    for name in ("row", "metric", "the paper", "ours", "runs"):
        table.add_column(name, justify="left" if name in ("row", "metric") else "right")
    for row in found["ours"]:
        told = theirs.get((row["label"], row["metric"]))
        spread = f"{row['mean']:.4g}" + (f" ± {row['std']:.2g}" if row["n"] > 1 else "")
        table.add_row(row["label"], row["metric"], "" if told is None else f"{told:g}", spread, str(row["n"]))
    Console().print(table)
    typer.echo(found["sentence"])
    typer.echo(f"rule: {found['rule']}" + (" (written when a result was known)" if found["post_hoc"] else ""))
    typer.echo(f"{found['verdict']}. {found['why']}")
    typer.echo(f"claim.json and claim.png: see {out}")
