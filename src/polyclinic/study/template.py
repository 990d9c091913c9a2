"""The template of `polyclinic study new`: every setting with its description."""

import contextlib
import textwrap
from collections.abc import Collection
from typing import Any

import tomli_w
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from polyclinic.errors import BadInput
from polyclinic.methods import METHODS, Method
from polyclinic.methods.shared.generative_replay import GenerativeReplay
from polyclinic.settings import Settings, variant
from polyclinic.study import Study
from polyclinic.study.study import PLAIN, VARIANTS, default_generator
from polyclinic.tasks import TASKS

#: the backbone of a template whose method needs an encoder
ENCODER = "efficientnet-lite0-1024"
#: settings that did best on validation images of three data sets, with FedAvg (docs/methods.md):
#: what a new study begins with, where its method is FedAvg or near to it
RECIPE: dict[str, dict[str, Any]] = {
    "optimizer": {"name": "adam", "lr": 0.003, "schedule": "cosine", "warmup": 2},
    "method": {"rounds": 20, "local_epochs": 2},
}
RECIPE_FOR = ("fedavg", "fedprox", "fedavgm", "fedbn")
RECIPE_NOTE = (
    "name, lr, schedule, warmup and method.local_epochs did best with FedAvg on three data sets: docs/methods.md"
)
#: what a setting without a default becomes in a template, so that the file is a study that can run
EXAMPLES = {"path": "path/to/your/images", "subgroup": "melanoma"}


def template(*, method: str, source: str, partition: str, task: str | None = None) -> str:
    """TOML text for the named variants; every setting has a comment above it. Tables that few need are comments."""
    chosen = {"data": source, "sites": partition, "task": task or first_task(source), "method": method}
    chosen["generator"] = default_generator(_method(method))
    needless, recipe = _needless(method), RECIPE if method in RECIPE_FOR else {}
    blocks = ["# A study for Polyclinic: run it with `polyclinic run FILE`."]
    for name in ("format", "seed"):
        blocks += _setting(name, Study.model_fields[name], Study.model_fields[name].default)
    for table in Study.model_fields:
        if table in VARIANTS:
            registry, key = VARIANTS[table]
            kind = variant(registry, {key: chosen[table]}, path=table, key=key)
            fixed = {key: chosen[table], **(_count(kind) if table == "sites" else {}), **recipe.get(table, {})}
            lines = _table(table, kind, fixed, f"{key} may be: {', '.join(sorted(registry))}")
        elif table in PLAIN:
            fixed = dict(recipe.get(table, {}))
            if table == "model" and _method(method).traits.needs_encoder:
                fixed["backbone"] = ENCODER
            elif table == "model" and TASKS[chosen["task"]].dense:
                fixed["backbone"] = "unet"
            lines = _table(table, PLAIN[table], fixed, RECIPE_NOTE if recipe and table == "optimizer" else "")
        else:
            continue
        blocks += [textwrap.indent("\n".join(lines), "# ")] if table in needless else lines
    return "\n".join(blocks) + "\n"


def _needless(method: str) -> set[str]:
    """Tables that a study of this method can do without."""
    chosen = _method(method)
    optional = {name for name, field in Study.model_fields.items() if field.default is None}
    optional -= {"audit"}  # without it a run cannot be audited
    if chosen.traits.trains == "private head":
        optional -= {"privacy"}
    if chosen.needs_generator():
        return optional - {"tuning"} if chosen.tunes_generator() else optional
    return optional - {"replay"} if isinstance(chosen, GenerativeReplay) else optional | {"generator"}


def _method(name: str) -> Method:
    return variant(METHODS, {"name": name}, path="method", key="name")(name=name)


def first_task(source: str) -> str:
    """The first task that a source has labels for."""
    registry, key = VARIANTS["data"]
    tasks = variant(registry, {key: source}, path="data", key=key).tasks  # type: ignore[attr-defined]
    if not tasks:
        raise BadInput(f"data.source: '{source}' names no task; give --task")
    return tasks[0]


def _count(kind: type[Settings]) -> dict[str, int]:
    """A number of sites, where the partition wants to be told one."""
    required = [name for name, field in kind.model_fields.items() if field.is_required()]
    needed = {name: EXAMPLES[name] for name in required if name in EXAMPLES}
    for counted in ({}, {"count": 4}, {"count": 2}):
        with contextlib.suppress(ValidationError, BadInput):
            kind.model_validate({**needed, **counted})
            return counted
    return {}


def _table(name: str, kind: type[Settings], fixed: dict[str, Any], note: str) -> list[str]:
    lines = ["", *_comment(note), f"[{name}]"]
    for setting, field in kind.model_fields.items():
        default = field.get_default(call_default_factory=True)
        usual = EXAMPLES.get(setting) if default is PydanticUndefined else default
        lines += _setting(setting, field, fixed.get(setting, usual))
    return lines


def settings_with_comments(chosen: Settings, without: Collection[str] = ()) -> list[str]:
    """The lines of one table with the chosen values, a comment above each."""
    lines: list[str] = []
    for name, field in type(chosen).model_fields.items():
        if name not in without:
            lines += _setting(name, field, getattr(chosen, name))
    return lines


def _setting(name: str, field: FieldInfo, value: Any) -> list[str]:
    """The setting's description as a comment, and its value; commented out where it has none."""
    comment = _comment(field.description or "")
    if value is None:
        return [*comment, f"# {name} ="]
    return [*comment, _assignment(name, value)]


def _assignment(name: str, value: Any) -> str:
    if isinstance(value, Settings):
        value = value.model_dump(exclude_none=True)
    if isinstance(value, dict):  # on one line, or what follows would belong to it
        inside = ", ".join(_assignment(key, item) for key, item in value.items())
        return f"{name} = {{ {inside} }}" if inside else f"{name} = {{}}"
    plain = list(value) if isinstance(value, tuple) else value
    return tomli_w.dumps({name: plain}).strip()


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, 108, initial_indent="# ", subsequent_indent="#   ") if text else []
