"""Frozen, validated configuration: the base of every table of a study.

A table that comes in variants (a method, a data source, a partition) names its variant in one field;
`variant` finds the class in a registry, and says in one sentence what the choices are when it cannot.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict

from polyclinic.errors import BadInput


class Settings(BaseModel):
    """A table of a study: immutable, and any field it does not know is an error."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", validate_default=True)


S = TypeVar("S", bound=Settings)


def nearest(word: str, choices: list[str]) -> str:
    """A hint for a misspelt word: ` (did you mean 'x'?)`, or nothing."""
    close = difflib.get_close_matches(word, choices, n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""


def variant(registry: Mapping[str, type[S]], table: Mapping[str, Any], *, path: str, key: str) -> type[S]:
    """The class that `table[key]` names in `registry`; `path` is the table's name in messages."""
    name = table.get(key)
    if name is None:
        raise BadInput(f"{path}.{key}: missing; choose one of {', '.join(sorted(registry))}")
    if not isinstance(name, str) or name not in registry:
        raise BadInput(f"{path}.{key}: {no_such_choice(str(name), sorted(registry))}")
    return registry[name]


def no_such_choice(word: str, choices: list[str]) -> str:
    """What is said of a name that nobody knows."""
    return f"no such choice: '{word}'{nearest(word, choices)}; choose one of {', '.join(choices)}"
