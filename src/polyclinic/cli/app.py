"""All commands under one name. Commands import what they need when they run, so that `--help` is quick."""

from __future__ import annotations

import typer

from polyclinic import __version__
from polyclinic.cli import (
    audit,
    bench,
    compare,
    data,
    deploy_questions,
    doctor,
    evaluate,
    export,
    forgetting,
    ledger,
    predict,
    privacy,
    report,
    run,
    serve,
    site,
    study,
    tune,
    weights,
    worth,
)
from polyclinic.cli.groups import Commands, SentencesGroup
from polyclinic.cli.list import list_entries
from polyclinic.cli.new_plugin import new_plugin

app = typer.Typer(
    cls=Commands,
    help="Hospitals train medical-imaging models together without sharing their images.",
    no_args_is_help=True,
    context_settings={"max_content_width": 100},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=_version, is_eager=True),
) -> None:
    """Hospitals train medical-imaging models together without sharing their images."""


app.command("run")(run.run)
app.command("list")(list_entries)
app.command("new-plugin")(new_plugin)
app.command("compare")(compare.compare)
app.command("tune")(tune.tune)
app.command("forgetting")(forgetting.forgetting)
app.add_typer(audit.app, name="audit")
app.command("predict")(predict.predict)
app.command("evaluate")(evaluate.evaluate)
app.command("worth")(worth.worth)
app.command("export")(export.export)
app.command("privacy")(privacy.privacy)
app.command("bench")(bench.bench)
app.command("doctor")(doctor.doctor)
app.command("serve")(serve.serve)
app.add_typer(report.app, name="report")
app.add_typer(ledger.app, name="ledger")
app.add_typer(deploy_questions.app, name="deploy", cls=SentencesGroup)  # that of deploy.py, with the questions
app.add_typer(site.app, name="site", cls=SentencesGroup)
app.add_typer(study.app, name="study", cls=SentencesGroup)
app.add_typer(data.app, name="data", cls=SentencesGroup)
app.add_typer(weights.app, name="weights", cls=SentencesGroup)
