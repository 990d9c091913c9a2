"""The study that its tables make up, how it is made from plain ones, and changes of settings (`--set a.b=c`).

`--set method.name=cwt` over a study of FedProx leaves out FedProx's own settings, and the tables that are not for cwt.
A notice names what is left out. Settings that are changed together with the variant stay, and are checked as always.
"""

import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from pydantic import Field, SerializeAsAny, TypeAdapter, ValidationError, model_validator

from polyclinic import plugins
from polyclinic.data.datasets import SOURCES, own_settings
from polyclinic.data.partitions import PARTITIONS, Sites
from polyclinic.data.pixels import MOST_PIXELS
from polyclinic.data.source import Source
from polyclinic.errors import BadInput, did_you_mean
from polyclinic.federation.layers.defence_and_poisoning import Defence, Poisoning
from polyclinic.federation.sums.settings import Federated
from polyclinic.generators import GENERATORS, Generator
from polyclinic.generators.private_tuning import PrivateTuning
from polyclinic.generators.vqvae2.model import VQVAE2
from polyclinic.json_types import JsonMapping, JsonObject
from polyclinic.methods import METHODS, Method
from polyclinic.methods.shared.generative_replay import GenerativeReplay, Replay, with_replay
from polyclinic.methods.shared.method import ReplayMethod
from polyclinic.models import RANDOM
from polyclinic.privacy.settings import Privacy
from polyclinic.questions import QUESTIONS
from polyclinic.registry import is_restricted, notice_once
from polyclinic.run_folder import STUDY_FORMAT, check_format
from polyclinic.settings import Settings, sentences, variant
from polyclinic.study import checks, release_checks
from polyclinic.study.tables import Audit, EngineSettings, Evaluation, Logging, Model, PolicySettings
from polyclinic.study.unused import notice_other_images
from polyclinic.tasks import TASKS, Task
from polyclinic.training.optimizer import Optimizer

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
#: settings that are left out of a study's tables where they are as usual: so they are in older studies
NEWER: tuple[tuple[str, str, Any], ...] = (
    ("audit", "patient_limit", 0.9),
    ("data", "max_pixels", MOST_PIXELS),
    ("data", "allow_outside", False),
    ("data", "class_folders", "auto"),
    ("data", "columns", []),
    ("method", "apart", 0.0),
    ("model", "arguments", {}),
    ("replay", "looks", 8),
    ("model", "weights", RANDOM),
    ("optimizer", "batch_sizes", {}),
    ("policy", "shares", "equal"),
    ("task", "accumulate", 1),
)


class Study(Settings):
    """The validated description of one experiment. Same study and same seed: same result, bit for bit."""

    format: int = Field(STUDY_FORMAT, ge=1, le=STUDY_FORMAT, description="format of this file")
    seed: int = Field(0, ge=0, description="seed of everything but the data's split and partition")
    plugins: tuple[str, ...] = Field(
        (), description="modules and Python files that add methods, sources, ...; paths begin at the study's folder"
    )
    data: SerializeAsAny[Source]
    sites: SerializeAsAny[Sites]
    task: SerializeAsAny[Task] = Field(default_factory=lambda: TASKS["classification"](name="classification"))
    model: Model = Field(default_factory=Model)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    method: SerializeAsAny[Method]
    replay: Replay | None = None
    generator: SerializeAsAny[Generator] = Field(default_factory=VQVAE2)
    tuning: PrivateTuning | None = None
    privacy: Privacy | None = None
    defence: Defence | None = None
    poisoning: Poisoning | None = None
    audit: Audit | None = None
    evaluation: Evaluation = Field(default_factory=Evaluation)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    policy: PolicySettings = Field(default_factory=PolicySettings)
    federation: Federated = Field(default_factory=Federated)
    logging: Logging | None = None

    @model_validator(mode="before")
    @classmethod
    def _tables(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        given = dict(given)
        if given.get("plugins"):
            given["plugins"] = plugins.resolve(given["plugins"], Path())
            plugins.load_from_study(given["plugins"])
            release_checks.check_attacks()
        tables = _all_tables(given)
        method = tables.get("method")
        if isinstance(method, GenerativeReplay):
            tables.setdefault("replay", Replay())
        elif isinstance(method, ReplayMethod) and tables.get("replay"):
            tables["method"] = method = with_replay(method)
        if isinstance(method, Method) and method.needs_generator():
            usual = default_generator(method)
            tables.setdefault("generator", GENERATORS[usual](name=usual))
            if method.tunes_generator() and tables["generator"].tunable:
                tables.setdefault("tuning", PrivateTuning())
        return tables

    @model_validator(mode="after")
    def _fits_together(self) -> "Study":
        for check in (*checks.CHECKS, *release_checks.CHECKS):
            check(self)
        return self

    def with_settings(self, changes: Mapping[str, Any]) -> "Study":
        """This study with some settings changed: `study.with_settings({"method.rounds": 5})`."""
        tables = self.as_tables()
        return parse_study(fit_to_variants(tables, apply_changes(tables, changes), changes))

    def as_tables(self) -> dict[str, Any]:
        """Plain tables, as in a TOML file, every default written out."""
        tables = _without_none(self.model_dump(mode="json"))
        for table, name, usual in NEWER:
            if tables.get(table, {}).get(name) == usual:
                del tables[table][name]
        if not self.plugins:
            del tables["plugins"]
        if self.federation == Federated():
            del tables["federation"]
        return tables

    def to_toml(self) -> str:
        return tomli_w.dumps(self.as_tables())

    @property
    def in_latents(self) -> bool:
        """Whether latents of frozen layers, or features, are replayed or sent as samples, and not images."""
        if self.method.learns_features and getattr(self.generator, "space", None) == "features":
            return True
        return self.replay is not None and self.replay.ratio > 0 and self.replay.space == "latents"

    @property
    def cut(self) -> str | None:
        """Where the network is split: `model.cut`, or the backbone's default cut if a method needs one; after the
        frozen layers, where what they give is replayed."""
        if self.in_latents:
            return self.model.freeze
        return self.model.cut or (checks.backbone_of(self).default_cut() if self.method.traits.needs_cut else None)


PLAIN: dict[str, type[Settings]] = {
    "model": Model,
    "optimizer": Optimizer,
    "replay": Replay,
    "tuning": PrivateTuning,
    "privacy": Privacy,
    "defence": Defence,
    "poisoning": Poisoning,
    "audit": Audit,
    "evaluation": Evaluation,
    "engine": EngineSettings,
    "policy": PolicySettings,
    "federation": Federated,
    "logging": Logging,
}


def parse_study(tables: Mapping[str, Any]) -> Study:
    """A study from plain tables; BadInput with a sentence for every field at fault."""
    check_format(tables.get("format", 1), STUDY_FORMAT, "format")  # first: a newer study may have tables unknown here
    known = list(Study.model_fields)
    unknown = [name for name in tables if name not in known]
    missing = [name for name in ("data", "sites", "method") if name not in tables]
    problems = [
        *(f"{name}: no such table{did_you_mean(name, known)}; the tables are {', '.join(known)}" for name in unknown),
        *(f"{name}: the study lacks the table [{name}]; `polyclinic study new` shows one" for name in missing),
    ]
    try:
        if problems:
            _all_tables({name: value for name, value in tables.items() if name in Study.model_fields}, problems)
        return Study(**tables)
    except ValidationError as error:
        raise BadInput(sentences(error, "", Study)) from None
    except BadInput as error:
        raise BadInput(_cure_at_site(str(error), tables.get("plugins"))) from None


def _all_tables(given: Mapping[str, Any], problems: Sequence[str] = ()) -> dict[str, Any]:
    """Every table as its settings object; one BadInput for all that is wrong, after the `problems` known already."""
    tables: dict[str, Any] = {}
    found = list(problems)
    for name in sorted(given, key=lambda name: name == "generator"):  # whose default the method knows
        value, method = given[name], tables.get("method")
        if name == "generator" and isinstance(value, Mapping) and "name" not in value and isinstance(method, Method):
            value = {"name": default_generator(method), **value}
        try:
            tables[name] = _table(name, value)
        except BadInput as error:
            found.append(str(error))
    if found:
        raise BadInput("\n".join(found))
    return {name: tables[name] for name in given}


def _table(name: str, value: Any) -> Any:
    """One table of a study as its settings object; BadInput names the field at fault."""
    if isinstance(value, Settings):
        return value
    if name not in VARIANTS and name not in PLAIN:
        return _single(name, value)
    if not isinstance(value, Mapping):
        raise BadInput(f"{name}: must be a table, [{name}], not {value!r}")
    kind: type[Settings]
    if name == "method" and isinstance(value.get("name"), str) and value["name"] in QUESTIONS:
        kind = QUESTIONS[value["name"]]
    elif name in VARIANTS:
        registry, key = VARIANTS[name]
        kind = variant(registry, value, path=name, key=key)
    else:
        kind = PLAIN[name]
    if issubclass(kind, Source):
        value, given = own_settings(kind, value), value
        if "path" not in given:  # with it, the study has settings for files and for drawn images side by side
            notice_other_images(kind.model_fields["source"].default, [one for one in given if one not in value])
    try:
        return kind.model_validate(dict(value))
    except ValidationError as error:
        raise BadInput(sentences(error, name, kind)) from None


def _single(name: str, value: Any) -> Any:
    """A setting outside all tables; BadInput beside what is wrong in the tables, and not after it."""
    field = Study.model_fields.get(name)
    try:
        kind: Any = Annotated[field.annotation, field] if field else Any
        TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise BadInput(sentences(error, name, Study)) from None
    return value


def _cure_at_site(message: str, plugged: Any) -> str:
    """What is said of a name that a deployed site does not know: a study brings no code."""
    if not is_restricted() or "no such choice" not in message:
        return message
    named = f"the study names the plug-in {', '.join(Path(one).name for one in plugged)}, and " if plugged else ""
    return (
        f"{message.partition(';')[0]} at this site; {named}a study brings no code: install what it needs here and list "
        "it as plugins in local/site.toml"
    )


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


# --- changes of settings --------------------------------------------------------------------------------


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
            added = changed.get("federation", {}).get("sum", "float") != "float" and "federation.sum" not in changes
            if added and METHODS[new](name=new).sum_obstacle():
                rest = {one: value for one, value in changed["federation"].items() if one != "sum"}
                changed, told = {**changed, "federation": rest}, [*told, "federation.sum"]
            replays = issubclass(METHODS[new], ReplayMethod) and not issubclass(METHODS[new], GenerativeReplay)
            if replays and changed.get("replay") is not None:  # its name does not tell it
                notice_once(f"method.name = '{new}': it replays, as the study has a table [replay]")
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
    return method.usual_generator if method.needs_generator() else "vqvae2"


def is_default_generator(old: str, new: str, table: object) -> bool:
    """Whether `[generator]` is what a study of the method `old` has without saying so, and `new` has another one."""
    before, after = (default_generator(METHODS[name](name=name)) for name in (old, new))
    return before != after and table == GENERATORS[before](name=before).model_dump(mode="json", exclude_none=True)


def _variant(study: JsonMapping, table: str, key: str) -> str:
    """The name of the variant, or nothing where the study does not say."""
    found = study.get(table)
    name = found.get(key) if isinstance(found, Mapping) else None
    return name if isinstance(name, str) else ""
