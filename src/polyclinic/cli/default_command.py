"""A group of commands one of which needs no name: `polyclinic ledger RUN` beside `polyclinic ledger verify RUN`."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class DefaultCommand(TyperGroup):
    """What is no name of a command goes to the command `default`. A folder called like one is written ./verify."""

    default = "default"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = [self.default, *args]
        return super().parse_args(ctx, args)
