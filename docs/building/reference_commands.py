"""The page about the command line, from the commands themselves."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer.main
from schema_words import cell, table

from polyclinic.cli.app import app

HEAD = """# Commands

*This page is made from the code when the documentation is built.*

Every command has `--help`. A command ends with 0 when all went well, with 2 when the input was bad (one sentence says
what and how to mend it), and with 1 when the work failed: [exit codes](../troubleshooting.md#exit-codes).
"""


def commands_page() -> str:
    return HEAD + "\n".join(_section(path, command) for path, command in _commands("polyclinic", _whole()))


def _whole() -> Any:
    return typer.main.get_command(app)


def _commands(path: str, group: Any) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if not command.hidden:
            yield f"{path} {name}", command
            if hasattr(command, "commands"):
                yield from _commands(f"{path} {name}", command)


def _section(path: str, command: Any) -> str:
    level = "##" if path.count(" ") == 1 else "###"
    parts = [f"\n{level} {path}", inspect.cleandoc(command.help or ""), f"```text\n{_usage(path, command)}\n```"]
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
    if arguments:
        parts.append(table(("argument", "meaning"), [[f"`{_shown(a)}`", cell(_help(a))] for a in arguments]))
    if options:
        parts.append(table(("option", "default", "meaning"), [_option(one) for one in options]))
    return "\n\n".join(parts) + "\n"


def _usage(path: str, command: Any) -> str:
    with command.make_context(path, [], resilient_parsing=True) as context:
        pieces = command.collect_usage_pieces(context)
    return " ".join([path, *pieces])


def _shown(argument: Any) -> str:
    return (argument.metavar or argument.name or "").upper()


def _help(parameter: Any) -> str:
    return getattr(parameter, "help", None) or ""


def _option(option: Any) -> list[str]:
    default = option.default
    shown = "" if default is None or default in (False, (), []) or callable(default) else f"`{default}`"
    return [" ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts)), cell(shown), cell(_help(option))]
