"""All commands under one name. Commands import what they need when they run, so that `--help` is quick."""

from collections.abc import Callable

import typer

from polyclinic import __version__
from polyclinic.cli import (
    audit,
    compare,
    data,
    deploy,
    doctor,
    evaluate,
    ledger,
    plugins,
    predict,
    privacy,
    report,
    run,
    site,
    study,
    withdraw,
)
from polyclinic.cli.groups import Commands

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


# in the order of `polyclinic --help`: single commands, then groups
commands: dict[str, Callable[..., None]] = {
    "start": study.start,
    "run": run.run,
    "list": plugins.list_entries,
    "new-plugin": plugins.new_plugin,
    "compare": compare.compare,
    "tune": compare.tune,
    "forgetting": evaluate.forgetting,
    "predict": predict.predict,
    "evaluate": evaluate.evaluate,
    "worth": evaluate.worth,
    "export": predict.export,
    "privacy": privacy.privacy,
    "withdraw": withdraw.withdraw,
    "bench": doctor.bench,
    "doctor": doctor.doctor,
    "serve": report.serve,
}
for name, command in commands.items():
    app.command(name)(command)
for group in (audit.app, report.app, ledger.app, deploy.app, site.app, study.app, data.app, data.weights_app):
    app.add_typer(group)
