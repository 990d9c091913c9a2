"""Groups of commands: whole sentences in help, a command that needs no name, commands of other packages."""

from importlib.metadata import EntryPoint
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from polyclinic.errors import BadInput
from polyclinic.registry import distribution_of, notice_once, points_of, reason

#: the group of entry points: `name = "package.module:function_or_typer_app"`
COMMANDS = "polyclinic.commands"
#: words that are no commands here -> where that is
ELSEWHERE = {
    "reproduce": "`pip install --editable lab` in the source tree of polyclinic adds this command",
    "dossier": "`polyclinic report RUN --dossier` writes one",
    "explain": "`polyclinic ledger show RUN --for-officer` explains what left, `polyclinic site show RUN` a study",
}
#: the commands of `polyclinic --help`, those of every day first; those of other packages come last
SECTIONS = {
    "Every day": ("start", "study", "run", "compare", "predict", "report", "list"),
    "Data": ("data",),
    "Privacy": ("audit", "privacy", "ledger"),
    "Hospitals": ("deploy", "site", "serve"),
    "Research": ("tune", "evaluate", "worth", "forgetting", "export", "reproduce", "new-plugin"),
    "This machine": ("doctor", "bench", "weights"),
}


class SentencesGroup(TyperGroup):
    """A group whose help shows the whole first sentence of each command, on as many lines as it takes."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        hidden = {name for name, command in self.commands.items() if command.hidden}
        names = [name for name in self.list_commands(ctx) if name not in hidden]
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.sentence(name)) for name in names])

    def sentence(self, name: str) -> str:
        """The first sentence of a command's help."""
        return self.commands[name].get_short_help_str(limit=10_000)


def group_of(name: str, help: str) -> typer.Typer:
    """A group of commands."""
    return typer.Typer(name=name, help=help, cls=SentencesGroup, no_args_is_help=True)


class Commands(SentencesGroup):
    """Our commands, and those that installed packages add by entry points; these are imported when they are used."""

    def list_commands(self, ctx: Any) -> list[str]:
        ours, theirs = super().list_commands(ctx), points_of(COMMANDS)
        for name in sorted(set(theirs) & set(ours)):
            who = distribution_of(theirs[name][0])
            notice_once(f"{who}: its command '{name}' is ignored, as polyclinic has one; give it another name")
        return [*ours, *sorted(set(theirs) - set(ours))]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        left = self.list_commands(ctx)
        for title, known in {**SECTIONS, "Of other packages": tuple(left)}.items():
            if names := [name for name in known if name in left]:
                left = [name for name in left if name not in names]
                with formatter.section(title):
                    formatter.write_dl([(name, self.sentence(name)) for name in names])

    def sentence(self, name: str) -> str:
        if name in self.commands:
            return super().sentence(name)
        return f"A command of {distribution_of(points_of(COMMANDS)[name][0])}."

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        points = points_of(COMMANDS).get(cmd_name, []) if cmd_name not in self.commands else []
        if len(points) > 1:
            both = " and ".join(distribution_of(point) for point in points)
            raise BadInput(f"{cmd_name}: {both} both have a command of this name; uninstall one of them")
        if points:
            return _imported(points[0])
        if cmd_name in ELSEWHERE and cmd_name not in self.commands:
            raise BadInput(f"{cmd_name}: {ELSEWHERE[cmd_name]}")
        return super().get_command(ctx, cmd_name)


def _imported(point: EntryPoint) -> Any:
    """The command of another package: a function, or a typer app, which is a group of commands."""
    host = typer.Typer(callback=lambda: None, rich_markup_mode=None)
    try:
        loaded = point.load()
        if isinstance(loaded, typer.Typer):
            host.add_typer(loaded, name=point.name, cls=SentencesGroup)
        else:
            host.command(point.name)(loaded)
        return typer.main.get_command(host).commands[point.name]  # type: ignore[attr-defined]
    except (Exception, SystemExit) as error:  # whatever a stranger's package does when it is imported
        raise BadInput(
            f"{distribution_of(point)}: its command '{point.name}' ({point.value}) cannot be used: {reason(error)}; "
            "repair or uninstall the package"
        ) from None


#: the command of a group that needs no name
UNNAMED = "default"


class UnnamedCommand(TyperCommand):
    """`polyclinic ledger RUN`: a command whose usage line does not show its name."""

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        formatter.write_usage(ctx.command_path.removesuffix(f" {UNNAMED}"), " ".join(self.collect_usage_pieces(ctx)))


class DefaultCommand(SentencesGroup):
    """A group in which all that is no name of a command goes to the command `default`: a folder is written ./verify."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = not args or args[0] in self.commands or args[0] == "--help"
        return super().parse_args(ctx, args if named else [UNNAMED, *args])
