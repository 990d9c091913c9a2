"""The study that its tables make up, and how it is made from plain ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from pydantic import Field, SerializeAsAny, TypeAdapter, ValidationError, model_validator

from polyclinic import plugins
from polyclinic.data.datasets import own_settings
from polyclinic.data.partitions import Sites
from polyclinic.data.pixels import MOST_PIXELS
from polyclinic.data.source import Source
from polyclinic.errors import BadInput, did_you_mean
from polyclinic.federation.layers.defence import Defence, Poisoning
from polyclinic.federation.sums.settings import Federated
from polyclinic.generators import GENERATORS, Generator
from polyclinic.generators.private_tuning import PrivateTuning
from polyclinic.generators.vqvae2.model import VQVAE2
from polyclinic.methods import Method
from polyclinic.methods.shared.generative_replay import GenerativeReplay, Replay, with_replay
from polyclinic.methods.shared.method import ReplayMethod
from polyclinic.models import RANDOM
from polyclinic.privacy.settings import Privacy
from polyclinic.questions import QUESTIONS
from polyclinic.registry import is_restricted
from polyclinic.run_folder import STUDY_FORMAT, check_format
from polyclinic.settings import Settings, sentences, variant
from polyclinic.study import checks, release_checks
from polyclinic.study.changes import VARIANTS, apply_changes, default_generator, fit_to_variants
from polyclinic.study.release_checks import check_attacks
from polyclinic.study.tables import Audit, EngineSettings, Evaluation, Logging, Model, PolicySettings
from polyclinic.study.unused import notice_other_images
from polyclinic.tasks import TASKS, Task
from polyclinic.training.optimizer import Optimizer

#: settings that are left out of a study's tables where they are as usual: so they are in older studies
NEWER: tuple[tuple[str, str, Any], ...] = (
    ("data", "max_pixels", MOST_PIXELS),
    ("data", "allow_outside", False),
    ("data", "class_folders", "auto"),
    ("data", "columns", []),
    ("method", "apart", 0.0),
    ("model", "arguments", {}),
    ("model", "weights", RANDOM),
    ("optimizer", "batch_sizes", {}),
    ("policy", "shares", "equal"),
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
            check_attacks()
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
    def _fits_together(self) -> Study:
        for check in (*checks.CHECKS, *release_checks.CHECKS):
            check(self)
        return self

    def with_settings(self, changes: Mapping[str, Any]) -> Study:
        """This study with some settings changed: `study.with_settings({"method.rounds": 5})`."""
        tables = self.as_tables()
        return parse_study(fit_to_variants(tables, apply_changes(tables, changes), changes))

    def as_tables(self) -> dict[str, Any]:
        """Plain tables, as in a TOML file, every default written out."""
        tables = _without_none(self.model_dump(mode="json"))
        for table, name, usual in NEWER:
            if tables[table].get(name) == usual:
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
        """Whether latents of frozen layers are replayed, and not images."""
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
    problems = _problems_of_names(tables)
    try:
        if problems:
            _all_tables({name: value for name, value in tables.items() if name in Study.model_fields}, problems)
        return Study(**tables)
    except ValidationError as error:
        raise BadInput(sentences(error, "", Study)) from None
    except BadInput as error:
        raise BadInput(_cure_at_site(str(error), tables.get("plugins"))) from None


def _problems_of_names(tables: Mapping[str, Any]) -> list[str]:
    """A sentence for each table that does not exist, and for each that is missing."""
    known = list(Study.model_fields)
    unknown = [name for name in tables if name not in known]
    missing = [name for name in ("data", "sites", "method") if name not in tables]
    return [
        *(f"{name}: no such table{did_you_mean(name, known)}; the tables are {', '.join(known)}" for name in unknown),
        *(f"{name}: the study lacks the table [{name}]; `polyclinic study new` shows one" for name in missing),
    ]


def _all_tables(given: Mapping[str, Any], problems: Sequence[str] = ()) -> dict[str, Any]:
    """Every table as its settings object; one BadInput for all that is wrong, after the `problems` known already."""
    tables: dict[str, Any] = {}
    found = list(problems)
    for name in sorted(given, key=lambda name: name == "generator"):  # whose default the method knows
        try:
            value = _with_name(given[name], tables.get("method")) if name == "generator" else given[name]
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


def _with_name(generator: Any, method: Any) -> Any:
    """The table `[generator]`, of the method's own generator where it names none."""
    if not isinstance(generator, Mapping) or "name" in generator or not isinstance(method, Method):
        return generator
    return {"name": default_generator(method), **generator}


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
