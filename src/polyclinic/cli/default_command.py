"""A group of commands one of which needs no name: `polyclinic ledger RUN` beside `polyclinic ledger verify RUN`."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class SentencesGroup(TyperGroup):
    """A group whose help shows the whole first sentence of each command, on as many lines as it takes."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        names = [name for name in self.list_commands(ctx) if not self.commands[name].hidden]
        shown = [(name, self.commands[name].get_short_help_str(limit=10_000)) for name in names]
        with formatter.section("Commands"):
            formatter.write_dl(shown)


#: the command of a group that needs no name
UNNAMED = "default"


def unnamed(context: type[Any]) -> type[Any]:
    """A class of contexts for a command that needs no name: usage lines do not show one."""

    class Unnamed(context):  # typer has its own copy of click
        @property
        def command_path(self) -> str:
            return str(super().command_path).removesuffix(f" {UNNAMED}")

    return Unnamed


class DefaultCommand(SentencesGroup):
    """What is no name of a command goes to the command `default`. A folder called like one is written ./verify."""

    default = UNNAMED

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        super().format_commands(ctx, formatter)
        formatter.write_paragraph()
        formatter.write_text(f"`{ctx.command_path} RUN --help` lists the options without a command's name.")

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        if found is not None and cmd_name == UNNAMED and found.context_class.__name__ != "Unnamed":
            found.context_class = unnamed(found.context_class)
        return found

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = [self.default, *args]
        return super().parse_args(ctx, args)
