"""Commands on all pages name commands and options that there are, and files of the repository that are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from polyclinic.cli.app import app
from polyclinic.cli.groups import UNNAMED, DefaultCommand

ROOT = Path(__file__).parents[1]
TOP = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")]
PAGES = [*TOP, *sorted((ROOT / "docs").rglob("*.md"))]
NAMED = r"(?<![\w./-])((?:examples|lab|tests)/[\w./-]+\.(?:py|toml|sh|ipynb))\b"
COMMANDS = typer.main.get_command(app)


def lines_of(page: Path) -> list[str]:
    """What a reader may type: the lines of blocks of commands, and commands within sentences."""
    text = page.read_text(encoding="utf-8")
    blocks = [re.sub(r"\\\n\s*", " ", block) for block in re.findall(r"```(?:bash|sh)\n(.*?)```", text, re.DOTALL)]
    quoted = re.findall(r"`(polyclinic [^`]+)`", re.sub(r"\n>?\s*", " ", text))
    return [*(line.strip() for block in blocks for line in block.splitlines()), *quoted]


def words_of(line: str) -> list[str]:
    """The words after `polyclinic`; `[--option]` in a sentence is that option."""
    return [word.strip("[]") for word in shlex.split(line, comments=True)[1:]]


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that is meant, and the words after its name."""
    command, rest = COMMANDS, list(words)
    while hasattr(command, "commands"):
        if rest and rest[0] in command.list_commands(None):  # also those of other packages
            command = command.get_command(None, rest.pop(0))
        elif isinstance(command, DefaultCommand) and rest:
            command = command.commands[UNNAMED]
        else:
            break
    return command, rest


def is_placeholder(word: str) -> bool:
    """Whether a word stands for others: `COMMAND`, `init|start`, `--help`."""
    return word.startswith("-") or "|" in word or word.isupper() or word == "..."


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_and_options_are_there(page):
    typed = [line for line in lines_of(page) if line.startswith("polyclinic ")]
    for line in typed:
        command, rest = command_of(words_of(line))
        unknown = hasattr(command, "commands") and rest and not is_placeholder(rest[0])
        assert not unknown, f"{page.name}: there is no such command: {line}"
        known = {"--help", *(option for one in command.params for option in (*one.opts, *one.secondary_opts))}
        for word in rest:
            option = word.partition("=")[0]
            fits = not option.startswith("--") or option in {"--", *known}
            assert fits, f"{page.name}: there is no option {option}: {line}"


def test_files_of_the_repository_that_pages_name_are_there():
    named = {(page, file) for page in PAGES for file in re.findall(NAMED, page.read_text(encoding="utf-8"))}
    assert len(named) > 50
    gone = [(page, file) for page, file in named if not (ROOT / file).exists() and "NAME" not in file]
    assert sorted(f"{page.name}: {file}" for page, file in gone) == []
