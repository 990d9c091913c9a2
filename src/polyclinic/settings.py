"""Frozen, validated configuration: the base of every table of a study.

A table that comes in variants (a method, a data source, a partition) names its variant in one field;
`variant` finds the class in a registry, and says in one sentence what the choices are when it cannot. `sentences` puts
what is wrong with a table into words that name the field and what is allowed.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from polyclinic.errors import BadInput, did_you_mean

#: between the labels of an image that has several, and what stands for none of them
SEVERAL, NO_LABEL = "|", "none"


class Settings(BaseModel):
    """A table of a study: immutable, and any field it does not know is an error."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", validate_default=True)


S = TypeVar("S", bound=Settings)


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
    return f"no such choice: '{word}'{did_you_mean(word, choices)}; choose one of {', '.join(choices)}"


#: settings that older versions had, and why they went: a study must not name them, a run folder may
GONE = {
    "engine.compiled": "training passes are not compiled any more",
    "generator.compile": "StyleGAN2's networks are not compiled any more",
    **dict.fromkeys(
        (f"policy.incoming.{name}" for name in ("images", "quiet", "exposed", "graded", "loss")),
        "the incoming check looks at no image any more",
    ),
}
#: settings that older versions called otherwise: a study must say the new name, a run folder may say the old one
RENAMED = {"privacy.noise": "noise_multiplier", "privacy.clip": "max_grad_norm"}
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
    # pydantic puts the tried type of a union into the path; users know only their fields
    types = ("int", "float", "str", "bool")
    parts = [str(one) for one in problem["loc"] if not (isinstance(one, str) and ("[" in one or one in types))]
    where = ".".join([path, *parts]).strip(".")
    allowed = list(kind.model_fields)
    if problem["type"] == "extra_forbidden":
        if where in GONE:
            return f"{where}: is gone: {GONE[where]}; delete it"
        if where in RENAMED:
            return f"{where}: is now called '{RENAMED[where]}', as in Opacus; rename it"
        word = str(problem["loc"][-1])
        return f"{where}: no such setting{did_you_mean(word, allowed)}; choose from {', '.join(allowed)}"
    if problem["type"] == "missing":
        field = kind.model_fields.get(str(problem["loc"][-1])) if problem["loc"] else None
        given = f"give {field.description}" if field and field.description else "it has no default"
        return f"{where}: missing; {given}"
    message = problem["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    for python, plain in PLAIN.items():
        message = message.replace(python, plain)
    given = "" if isinstance(problem["input"], Mapping) else f" (it is {problem['input']!r})"
    return f"{where}: {message[0].lower()}{message[1:]}{given}"
