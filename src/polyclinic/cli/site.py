"""`polyclinic site`: for the people of a hospital; which studies may run here, and what has left."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from polyclinic.cli.groups import group_of
from polyclinic.errors import BadInput

if TYPE_CHECKING:
    from polyclinic.deployment.approval import Approvals

app = group_of("site", "Decide which studies run at this site, and see what left (for hospitals).")

KIT = typer.Option(Path(), "--kit", "-k", help="The kit of the site; by default the folder you are in.")
RUN = typer.Argument(..., help="The name of the run, as `site pending` shows it.")
WHY = typer.Option("", "--why", help="Your reason; it is kept with the decision, at this site.")


@app.command("pending")
def pending(kit: Path = KIT) -> None:
    """List the studies that wait for a decision, and those that are suspended."""
    from polyclinic.federation.layers.suspension import Suspensions

    approvals, stopped = approvals_of(kit), Suspensions(kit).all()
    waiting = list(approvals.waiting())
    for one in stopped:
        typer.echo(f"{one.study}: suspended since {one.since}, with all studies of this site: {one.reason}")
    for sentence in approvals.damaged():
        typer.echo(sentence)
    for request in waiting:
        method = request.study["method"]
        rounds = "1 round" if method["rounds"] == 1 else f"{method['rounds']} rounds"
        typer.echo(f"{request.run}: waits since {request.since} ({method['name']}, {rounds})")
    if stopped or waiting:
        typer.echo("`polyclinic site show RUN` says what a study asks for; then `approve RUN` or `refuse RUN`")
    else:
        typer.echo("nothing waits for you")


@app.command("show")
def show(run: str = RUN, kit: Path = KIT) -> None:
    """Say in plain sentences what a study asks of this site."""
    from polyclinic.deployment.site_status import describe

    for line in describe(approvals_of(kit), run).lines:
        typer.echo(line)


@app.command("approve")
def approve(
    run: str = RUN,
    why: str = WHY,
    kit: Path = KIT,
    who: str = typer.Option("", "--by", help="Your name, to stand beside the user of this machine."),
) -> None:
    """Let a study run at this site, or go on after it was suspended."""
    from polyclinic.deployment.site_status import REFUSED, describe

    approvals, refused = approvals_of(kit), []
    with contextlib.suppress(BadInput):  # what cannot be described can be decided all the same
        refused = describe(approvals, run).refused
    approvals.decide(run, "approve", why, who)
    typer.echo(f"{run}: approved, for this study and this policy; `polyclinic site revoke {run}` takes it back")
    for sentence in [REFUSED, *refused] if refused else []:
        typer.echo(sentence)


@app.command("refuse")
def refuse(run: str = RUN, why: str = WHY, kit: Path = KIT) -> None:
    """Refuse a study that waits; the coordinator is told that it was refused, and not why."""
    approvals_of(kit).decide(run, "refuse", why)
    typer.echo(f"{run}: refused; nothing of it runs here")


@app.command("revoke")
def revoke(run: str = RUN, why: str = WHY, kit: Path = KIT) -> None:
    """Take an approval back: nothing more of this study leaves."""
    approvals_of(kit).decide(run, "revoke", why)
    typer.echo(f"{run}: revoked; nothing more of it leaves. What left before is in {kit / 'runs' / run / 'ledger'}")


@app.command("status")
def status(kit: Path = KIT) -> None:
    """Say what runs at this site, what has left so far, and what is left of its budgets."""
    from polyclinic.deployment.approval_rules import policy_of
    from polyclinic.deployment.processes import process_of
    from polyclinic.deployment.site_status import budgets, runs_of, standing, who_takes_part

    approvals = approvals_of(kit)
    policy = policy_of(approvals.policy_file)
    typer.echo(f"site {approvals.site}: {'running' if process_of(approvals.kit) else 'not running on this machine'}")
    typer.echo(who_takes_part(approvals.kit))
    runs = runs_of(approvals.kit, approvals.site, policy)
    for run in runs:
        typer.echo(f"{run.name}: {'at work' if run.at_work else 'not at work'}. {standing(approvals, run.name)}")
        for kind, size in run.bytes_by_kind.items():
            parcels = sum(line["kind"] == kind for line in run.lines)
            typer.echo(f"  {kind}: {parcels} parcels, {size:,} bytes left the site")
        if run.lines:
            last = run.lines[-1]
            typer.echo(f"  last: {last['kind']} by '{last['operation']}' in round {last['round']}, to {last['to']}")
    typer.echo("over all runs:")
    for one in budgets(policy, runs):
        typer.echo(f"  {one.sentence}")


# --- keys, and who takes part --------------------------------------------------------------------------


@app.command("join")
def join(
    invitation: Path = typer.Argument(..., help="invitation.json, as the coordinator sent it."),
    name: str = typer.Argument(..., help="The name of your site, one of those that the invitation asks for."),
    kit: Path | None = typer.Option(None, "--kit", "-k", help="New folder.  [default: NAME]", show_default=False),
) -> None:
    """Draw this site's private keys here, and write the request that the coordinator needs."""
    from polyclinic.deployment import joining
    from polyclinic.deployment.confirmation import read
    from polyclinic.engines.nvflare.job import refuse_missing

    refuse_missing()
    kit = kit or Path(name)
    file = joining.join(read(invitation, joining.Invitation), name, kit)
    say_request(kit, file)


@app.command("rotate-keys")
def rotate_keys(kit: Path = KIT) -> None:
    """Draw new private keys here; they count when all sites have confirmed the new list."""
    from polyclinic.deployment.joining import draw_keys

    approvals = approvals_of(kit)
    say_request(kit, draw_keys(approvals.kit, approvals.site))


def say_request(kit: Path, file: Path) -> None:
    typer.echo(f"drew new private keys in {kit}; they stay there, and nobody else ever needs them")
    typer.echo(f"send {file} to the coordinator (it holds nothing secret), and wait for its admission.json")
    typer.echo(f"then: polyclinic site confirm admission.json --kit {kit}")


@app.command("confirm")
def confirm(
    admission: Path = typer.Argument(..., help="admission.json, as the coordinator sent it."),
    kit: Path = KIT,
    words: str | None = typer.Option(
        None, help="The words that the other site read to you; asked for if not given.", show_default=False
    ),
    server: str = typer.Option("", help="HOST:PORT of your hospital's relay, if sites cannot reach the server itself."),
) -> None:
    """Compare who takes part with another site by telephone, and make this site's kit."""
    from polyclinic.deployment import joining
    from polyclinic.deployment.confirmation import read, same_words
    from polyclinic.engines.nvflare.job import refuse_missing

    refuse_missing()
    found = joining.to_confirm(kit.resolve(), read(admission, joining.Admission))
    for sentence in found.sentences():
        typer.echo(sentence)
    if found.is_known:
        typer.echo("this list was confirmed before: nobody needs to call")
    elif words is None:
        others = [f"site '{name}'" for name in found.roster.neighbours(found.site)] or ["the coordinator"]
        typer.echo(f"\nThe words of this list:\n\n    {found.roster.words}\n")
        typer.echo(f"Call the people of {others[0]}, at a number that the coordinator did not give you. Read these")
        typer.echo("words to each other. Are all twelve the same, you see one list, and nobody has exchanged a key.")
        if others[1:]:
            typer.echo(f"The people of {others[1]} call you. If they do not, or have no list yet, confirm nothing.")
        heard = [str(typer.prompt(f"The words that the people of {other} read to you")) for other in others]
        words = next((one for one in heard if not same_words(one, found.roster.words)), heard[0])
    relay = joining.confirm(found, words or "", server=server)
    typer.echo(f"confirmed; {kit} is the kit of site '{found.site}': README.txt there says what to do next")
    if relay:
        typer.echo(f"it reaches the server by {relay}")
    if not found.is_known:
        typer.echo("approve no study before the people of all sites say that they have confirmed the same list")


@app.command("leave")
def leave(kit: Path = KIT, yes: bool = typer.Option(False, "--yes", help="Do it: else nothing is deleted.")) -> None:
    """Leave the federation for good: delete this site's private keys, and keep its ledgers."""
    from polyclinic.deployment import site_status

    approvals = approvals_of(kit)
    if not yes:
        raise BadInput("--yes: missing; with it the kit's private keys, noise and cache of images are deleted for good")
    for path in site_status.leave(approvals.kit, approvals.site):
        typer.echo(f"deleted {path}")
    site = approvals.site
    typer.echo(f"site {site} has left. Its ledgers, decisions, models and public keys stay in {kit}: keep them.")
    typer.echo(f"Tell the coordinator: `polyclinic deploy revoke-site {site}`, and no study names the site again")


@app.command("distrust")
def distrust(
    other: str = typer.Argument(..., help="The name of another site, whose kit was stolen or which has left."),
    kit: Path = KIT,
) -> None:
    """Seal nothing for another site any more."""
    from polyclinic.deployment import site_status

    site_status.distrust(approvals_of(kit).kit, other)
    typer.echo(f"{other}: this site seals nothing for it any more; its old ledgers can still be verified")


# --- behind the commands ------------------------------------------------------------------------------


def approvals_of(kit: Path) -> "Approvals":
    """Decisions of the site whose kit this is."""
    from polyclinic.deployment.site_status import approvals_of as found

    return found(kit)
