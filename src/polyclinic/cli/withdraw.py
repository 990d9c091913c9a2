"""`polyclinic withdraw`: carry a run out again without patients who left the study, with a certificate."""

from pathlib import Path

import typer

from polyclinic.errors import BadInput


def withdraw(
    run: Path = typer.Argument(..., help="The run that the patients leave."),
    patients: Path | None = typer.Option(None, "--patients", help="A file with a patient in each line."),
    out: Path | None = typer.Option(None, "--out", help="The folder of the new run; RUN-without if not given."),
    plan: bool = typer.Option(False, "--plan", help="Only say what it takes."),
    check: Path | None = typer.Option(None, "--check", help="Check the certificate of this new run; nothing is run."),
) -> None:
    """Take patients out of a run: the same study again, as if it had never seen them, and a certificate.

    The list of patients stays beside the new run, and only its owner may read it; the certificate names nobody. At a
    deployed site, write them into local/opt-out.txt of the kit: it is read at every start.
    """
    from polyclinic.audits.withdrawal import CERTIFICATE, Withdrawal, check_certificate
    from polyclinic.cli.display import RunDisplay

    if check is not None:
        typer.echo("\n".join(check_certificate(run, check, patients)))
        return
    if patients is None:
        raise BadInput("--patients: missing; name a file with a patient in each line")
    leaving = Withdrawal(run, patients)
    for sentence in leaving.cost():
        typer.echo(sentence, err=True)
    if plan:
        return
    folder = out or run.with_name(f"{run.resolve().name}-without")
    display = RunDisplay()
    try:
        found = leaving.carry_out(folder, display)
    finally:
        display.close()
    typer.echo(f"new model: {folder} (weights {found['after']['weights_sha256'][:12]})")
    typer.echo("\n".join(f"cannot be taken back: {sentence}" for sentence in found["cannot_be_taken_back"]))
    typer.echo(f"certificate: {folder / CERTIFICATE}")
