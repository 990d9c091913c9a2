"""Words for people: sizes, and validation errors as sentences that name the field and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from polyclinic.settings import Settings, nearest


def human_bytes(count: float) -> str:
    """`1.4 MB`, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


#: settings that older versions had, and why they went: a study must not name them, a run folder may
GONE = {"engine.compiled": "training passes are not compiled any more"}
#: what pydantic calls by Python's words, as somebody knows it who writes a study
PLAIN = {
    "a valid tuple": "a list, such as ['a', 'b']",
    "a valid list": "a list, such as ['a', 'b']",
    "a valid dictionary": "a table, such as {old = 'new'}",
    "a valid string": "a text in quotes",
    "a valid boolean": "true or false",
}


def sentences(error: ValidationError, path: str, kind: type[Settings]) -> str:
    """A sentence for each problem: the field's path, what is wrong, what is allowed."""
    return "\n".join(_sentence(problem, path, kind) for problem in error.errors())


def _sentence(problem: Any, path: str, kind: type[Settings]) -> str:
    where = ".".join([path, *(str(part) for part in problem["loc"] if not _is_type(part))]).strip(".")
    allowed = list(kind.model_fields)
    if problem["type"] == "extra_forbidden":
        if where in GONE:
            return f"{where}: is gone: {GONE[where]}; delete it"
        word = str(problem["loc"][-1])
        return f"{where}: no such setting{nearest(word, allowed)}; choose from {', '.join(allowed)}"
    if problem["type"] == "missing":
        return f"{where}: missing; {_description(kind, problem['loc'])}"
    message = problem["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    for python, plain in PLAIN.items():
        message = message.replace(python, plain)
    given = "" if isinstance(problem["input"], Mapping) else f" (it is {problem['input']!r})"
    return f"{where}: {message[0].lower()}{message[1:]}{given}"


def _is_type(part: object) -> bool:
    """Pydantic puts the tried type of a union into the path; users know only their fields."""
    return isinstance(part, str) and ("[" in part or part in ("int", "float", "str", "bool"))


def _description(kind: type[Settings], location: tuple) -> str:
    field = kind.model_fields.get(str(location[-1])) if location else None
    return f"give {field.description}" if field and field.description else "it has no default"
