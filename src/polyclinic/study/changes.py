"""Changes of settings (`--set a.b=c`), and what a change of a variant does to the other settings of a study.

`--set method.name=cwt` over a study of FedProx leaves out FedProx's own settings, and the tables that are not for cwt.
A notice names what is left out. Settings that are changed together with the variant stay, and are checked as always.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping

from polyclinic.data.datasets import SOURCES, own_settings
from polyclinic.data.partitions import PARTITIONS
from polyclinic.data.source import Source
from polyclinic.errors import BadInput
from polyclinic.generators import GENERATORS
from polyclinic.json_types import JsonMapping, JsonObject
from polyclinic.methods import METHODS, Method
from polyclinic.methods.shared.generative_replay import GenerativeReplay
from polyclinic.methods.shared.method import ReplayMethod
from polyclinic.registry import notice_once
from polyclinic.settings import Settings
from polyclinic.tasks import TASKS

#: tables that come in variants: their registry, and the field that names the variant
VARIANTS: dict[str, tuple[Mapping[str, type[Settings]], str]] = {
    "data": (SOURCES, "source"),
    "sites": (PARTITIONS, "partition"),
    "task": (TASKS, "name"),
    "method": (METHODS, "name"),
    "generator": (GENERATORS, "name"),
}
#: tables that only some methods have a use for
TABLES_OF_METHODS = ("replay", "tuning")


def parse_sets(sets: list[str]) -> JsonObject:
    """`a.b=c` texts as a table of changes; c is read as TOML where it is, else as text."""
    changes: JsonObject = {}
    for text in sets:
        path, equals, value = text.partition("=")
        if not equals or not path.strip():
            raise BadInput(f"--set {text}: write it as table.setting=value, for example method.rounds=5")
        try:
            changes[path.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            changes[path.strip()] = value.strip()
    return changes


def apply_changes(tables: JsonMapping, changes: JsonMapping) -> JsonObject:
    """The tables with changes, `table.setting` -> value."""
    changed = {name: dict(value) if isinstance(value, Mapping) else value for name, value in tables.items()}
    for path, value in changes.items():
        *parents, last = path.split(".")
        table = changed
        for parent in parents:
            table = table.setdefault(parent, {})
            if not isinstance(table, dict):
                raise BadInput(f"{path}: '{parent}' is not a table")
        table[last] = value
    return changed


def fit_to_variants(tables: JsonMapping, changed: JsonObject, changes: Collection[str]) -> JsonObject:
    """`changed` without the settings and tables that are only for a variant that `tables` had chosen.

    `changes` names what was changed on the way from `tables` to `changed`: `table.setting`. It stays.
    """
    for name, (registry, key) in VARIANTS.items():
        old, new = (_variant(study, name, key) for study in (tables, changed))
        if old == new or old not in registry or new not in registry:
            continue
        before, after = registry[old].model_fields, registry[new]
        settings = own_settings(after, changed[name]) if issubclass(after, Source) else changed[name]
        lost = [one for one in settings if one in before and one not in after.model_fields]
        lost = [one for one in lost if f"{name}.{one}" not in changes]
        usual = [before[one].get_default(call_default_factory=True) for one in lost]  # undefined where there is none
        told = [f"{name}.{one}" for one, value in zip(lost, usual, strict=True) if changed[name][one] != value]
        changed = {**changed, name: {one: value for one, value in changed[name].items() if one not in lost}}
        if name == "method":
            gone = [one for one in TABLES_OF_METHODS if one in tables and not method_has_table(old, new, one)]
            gone = [one for one in gone if not any(path.partition(".")[0] == one for path in changes)]
            changed = {one: value for one, value in changed.items() if one not in gone}
            told += [f"the table [{one}]" for one in gone]
            own = not any(path.partition(".")[0] == "generator" for path in changes)
            if own and is_default_generator(old, new, changed.get("generator")):
                changed = {one: value for one, value in changed.items() if one != "generator"}
            _notice_replay(new, changed)
        if told:
            are = "are" if len(told) > 1 else "is"
            notice_once(f"{name}.{key} = '{new}': {', '.join(told)} of the study {are} left out, being for '{old}'")
    return changed


def method_has_table(old: str, new: str, table: str) -> bool:
    """Whether a table of a study with the method `old` is for the method `new`, too.

    `[replay]` of a method that replays by its name (cwt-replay) is for such methods only. `[tuning]` is for methods
    that train a generator in phases.
    """
    if table == "replay":
        return not issubclass(METHODS[old], GenerativeReplay) or issubclass(METHODS[new], GenerativeReplay)
    if table == "tuning":
        return METHODS[new](name=new).tunes_generator()
    return True


def default_generator(method: Method) -> str:
    """The generator of a study that names none."""
    return "dcgan" if method.needs_generator() else "vqvae2"


def is_default_generator(old: str, new: str, table: object) -> bool:
    """Whether `[generator]` is what a study of the method `old` has without saying so, and `new` has another one."""
    before, after = (default_generator(METHODS[name](name=name)) for name in (old, new))
    return before != after and table == GENERATORS[before](name=before).model_dump(mode="json", exclude_none=True)


def _notice_replay(method: str, study: JsonMapping) -> None:
    """Say that a method whose name does not tell it will replay, since the study has a table for that."""
    kind = METHODS[method]
    if study.get("replay") is not None and issubclass(kind, ReplayMethod) and not issubclass(kind, GenerativeReplay):
        notice_once(f"method.name = '{method}': it replays, as the study has a table [replay]")


def _variant(study: JsonMapping, table: str, key: str) -> str:
    """The name of the variant, or nothing where the study does not say."""
    found = study.get(table)
    name = found.get(key) if isinstance(found, Mapping) else None
    return name if isinstance(name, str) else ""
