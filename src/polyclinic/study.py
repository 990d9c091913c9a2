"""A study: what a user writes down. Validated as a whole, with errors that name the field and the cure.

study = load_study(Path("study.toml"), ["method.rounds=5"])
study = Study(data={"source": "fundus-phantom"}, sites={"partition": "iid", "count": 4}, method={"name": "cwt"})
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import tomli_w
import torch
from pydantic import Field, SerializeAsAny, ValidationError, field_validator, model_validator

from polyclinic.audit.defence import Defence
from polyclinic.audit.settings import Audit
from polyclinic.data.datasets import SOURCES
from polyclinic.data.partition import PARTITIONS, Sites
from polyclinic.data.source import Source
from polyclinic.errors import BadInput
from polyclinic.federation.parcel import KINDS
from polyclinic.generators import GENERATORS, Generator
from polyclinic.generators.dcgan import DCGAN
from polyclinic.generators.generator import SMALLEST_IMAGE
from polyclinic.generators.private_tuning import PrivateTuning, can_tune
from polyclinic.generators.vqvae2 import VQVAE2
from polyclinic.methods import METHODS, Method
from polyclinic.methods.replay import Replay
from polyclinic.models import BACKBONES, NORMS, build, norm_names
from polyclinic.privacy import settings as private
from polyclinic.privacy.settings import Privacy
from polyclinic.settings import Settings, nearest, variant
from polyclinic.tasks import TASKS, Task
from polyclinic.training import Optimizer


class Model(Settings):
    """The `[model]` table: the network, and what of it stays at the sites."""

    backbone: str = Field("small-cnn", description=f"the network: {', '.join(BACKBONES)}")
    backbones: dict[str, str] = Field(
        {}, description='networks of sites that have another one: { north = "resnet18" }; where models are not averaged'
    )
    norm: Literal[*NORMS] = Field("batch", description="batch or group normalisation")  # type: ignore[valid-type]
    cut: str | None = Field(None, description="the layer after which a method may split the network")
    batch_norm: Literal["average", "local"] = Field(
        "average", description="batch-norm statistics travel and are averaged with the weights, or stay local"
    )


class Evaluation(Settings):
    """The `[evaluation]` table: when models are scored, and which one is released."""

    every: int = Field(1, ge=0, description="rounds between scores on validation images; 0 for none")
    select: Literal["best", "last"] = Field(
        "best",
        description="release the model of the round with the best validation score, or of the last round",
    )
    handovers: Literal["none", "last", "all"] = Field(
        "last", description="rounds whose hand-overs a serial method keeps for `polyclinic forgetting`"
    )


class EngineTable(Settings):
    """The `[engine]` table: where the work runs, and what happens when a site fails."""

    name: Literal["in-process", "ray", "nvflare"] = Field("in-process", description="what carries calls to sites")
    workers: int | Literal["auto"] = Field(
        "auto",
        description="worker processes (ray: actors) for sites that train at once; auto takes more where it pays",
    )
    address: str | None = Field(None, description="ray: address of a cluster to join; without one, Ray starts here")
    gpus: float | None = Field(
        None, ge=0, le=64, description="ray: GPUs that an actor takes, such as 0.5; a quarter on a GPU if not given"
    )
    threads: int = Field(1, ge=1, description="threads a site computes with; part of the result's last bits")
    device: str = Field("auto", description="cpu, cuda, cuda:1, ...; auto takes a GPU where there is one")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="arithmetic of training; auto is bf16 on a GPU and fp32 on a CPU"
    )
    graphs: bool = Field(
        False, description="on a GPU: record a training step's passes as a CUDA graph; small networks gain most"
    )
    deadline: float | None = Field(
        None,
        gt=0,
        description="seconds a site may take for one operation; sites run in worker processes then",
    )
    silence: float = Field(
        60.0, gt=0, description="nvflare: seconds without a sign of life after which a site counts as lost"
    )
    on_failure: Literal["continue", "stop"] = Field(
        "continue",
        description="when a site fails: go on with the others, or stop (a stopped run can be resumed)",
    )
    quorum: float = Field(0.5, gt=0, le=1, description="share of the sites that must be left for a round to go on")
    checkpoint_every: int = Field(1, ge=0, description="rounds between checkpoints; 0 for none")

    @field_validator("workers")
    @classmethod
    def _workers(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError("must be at least 1, or 'auto'")
        return value


class PolicyTable(Settings):
    """The `[policy]` table: what simulated sites let out. A deployed site has a policy of its own."""

    kinds: tuple[Literal[*KINDS], ...] = Field(KINDS, description="kinds of parcel that may leave a site")  # type: ignore[valid-type]


class Study(Settings):
    """The validated description of one experiment. Same study and same seed: same result, bit for bit."""

    seed: int = Field(0, ge=0, description="seed of everything but the data's split and partition")
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
    audit: Audit | None = None
    evaluation: Evaluation = Field(default_factory=Evaluation)
    engine: EngineTable = Field(default_factory=EngineTable)
    policy: PolicyTable = Field(default_factory=PolicyTable)

    @model_validator(mode="before")
    @classmethod
    def _tables(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        tables = {name: _table(name, value) for name, value in given.items()}
        if getattr(tables.get("method"), "replays", False):  # cwt-replay is cwt with the table [replay]
            tables.setdefault("replay", Replay())
        method = tables.get("method")
        if isinstance(method, Method) and method.needs_generator():
            tables.setdefault("generator", DCGAN())
            if method.tunes_generator and can_tune(tables["generator"]):
                tables.setdefault("tuning", PrivateTuning())
        return tables

    @model_validator(mode="after")
    def _fits_together(self) -> Study:
        check_task(self)
        check_model(self)
        check_replay(self)
        check_tuning(self)
        check_privacy(self)
        return self

    def with_settings(self, changes: Mapping[str, Any]) -> Study:
        """This study with some settings changed: `study.with_settings({"method.rounds": 5})`."""
        return parse_study(_changed(self.as_tables(), changes))

    def as_tables(self) -> dict[str, Any]:
        """Plain tables, as in a TOML file, every default written out."""
        return _without_none(self.model_dump(mode="json"))

    def to_toml(self) -> str:
        return tomli_w.dumps(self.as_tables())

    @property
    def cut(self) -> str | None:
        """Where the network is split: `model.cut`, or the backbone's first cut if a method needs one."""
        cuts = _cuts(self.model.backbone)
        return self.model.cut or (cuts[0] if self.method.needs_cut else None)


# --- reading ------------------------------------------------------------------------------------------

#: tables that come in variants: their registry, and the field that names the variant
VARIANTS: dict[str, tuple[Mapping[str, type[Settings]], str]] = {
    "data": (SOURCES, "source"),
    "sites": (PARTITIONS, "partition"),
    "task": (TASKS, "name"),
    "method": (METHODS, "name"),
    "generator": (GENERATORS, "name"),
}
PLAIN: dict[str, type[Settings]] = {
    "model": Model,
    "optimizer": Optimizer,
    "replay": Replay,
    "tuning": PrivateTuning,
    "privacy": Privacy,
    "defence": Defence,
    "audit": Audit,
    "evaluation": Evaluation,
    "engine": EngineTable,
    "policy": PolicyTable,
}


def load_study(path: Path, sets: list[str] | None = None) -> Study:
    """The study in a TOML file, with `a.b=c` settings on top; BadInput says what is wrong with it."""
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file; `polyclinic study new {path}` writes one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{path}: is not valid TOML: {error}") from None
    return parse_study(_changed(tables, parse_sets(sets or [])))


def parse_study(tables: Mapping[str, Any]) -> Study:
    """A study from plain tables; BadInput with a sentence for every field at fault."""
    unknown = [name for name in tables if name not in Study.model_fields]
    missing = [name for name in ("data", "sites", "method") if name not in tables]
    if unknown:
        known = list(Study.model_fields)
        raise BadInput(f"{unknown[0]}: no such table{nearest(unknown[0], known)}; the tables are {', '.join(known)}")
    if missing:
        raise BadInput(f"{missing[0]}: the study lacks the table [{missing[0]}]; `polyclinic study new` shows one")
    try:
        return Study(**tables)
    except ValidationError as error:
        raise BadInput(sentences(error, "", Study)) from None


def parse_sets(sets: list[str]) -> dict[str, Any]:
    """`a.b=c` texts as a table of changes; c is read as TOML where it is, else as text."""
    changes: dict[str, Any] = {}
    for text in sets:
        path, equals, value = text.partition("=")
        if not equals or not path.strip():
            raise BadInput(f"--set {text}: write it as table.setting=value, for example method.rounds=5")
        try:
            changes[path.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            changes[path.strip()] = value.strip()
    return changes


def _changed(tables: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
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


def _table(name: str, value: Any) -> Any:
    """One table of a study as its settings object; BadInput names the field at fault."""
    if (name not in VARIANTS and name not in PLAIN) or isinstance(value, Settings):
        return value
    if not isinstance(value, Mapping):
        raise BadInput(f"{name}: must be a table, [{name}], not {value!r}")
    kind: type[Settings]
    if name in VARIANTS:
        registry, key = VARIANTS[name]
        kind = variant(registry, value, path=name, key=key)
    else:
        kind = PLAIN[name]
    try:
        return kind.model_validate(dict(value))
    except ValidationError as error:
        raise BadInput(sentences(error, name, kind)) from None


def sentences(error: ValidationError, path: str, kind: type[Settings]) -> str:
    """A sentence for each problem: the field's path, what is wrong, what is allowed."""
    return "\n".join(_sentence(problem, path, kind) for problem in error.errors())


def _sentence(problem: Any, path: str, kind: type[Settings]) -> str:
    where = ".".join([path, *(str(part) for part in problem["loc"] if not _is_type(part))]).strip(".")
    allowed = list(kind.model_fields)
    if problem["type"] == "extra_forbidden":
        word = str(problem["loc"][-1])
        return f"{where}: no such setting{nearest(word, allowed)}; choose from {', '.join(allowed)}"
    if problem["type"] == "missing":
        return f"{where}: missing; {_description(kind, problem['loc'])}"
    message = problem["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    given = "" if isinstance(problem["input"], Mapping) else f" (it is {problem['input']!r})"
    return f"{where}: {message[0].lower()}{message[1:]}{given}"


def _is_type(part: Any) -> bool:
    """Pydantic puts the tried type of a union into the path; users know only their fields."""
    return isinstance(part, str) and ("[" in part or part in ("int", "float", "str", "bool"))


def _description(kind: type[Settings], location: tuple) -> str:
    field = kind.model_fields.get(str(location[-1])) if location else None
    return f"give {field.description}" if field and field.description else "it has no default"


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


# --- combinations that cannot work --------------------------------------------------------------------


def check_task(study: Study) -> None:
    """BadInput if the data, the network or the method cannot do the study's task."""
    task, method = study.task.name, study.method
    if task not in study.data.tasks:
        can = ", ".join(study.data.tasks)
        raise BadInput(f"task.name: '{study.data.source}' has no labels for {task}; it is for {can}")
    if task not in method.tasks:
        raise BadInput(f"task.name: method '{method.name}' is for {', '.join(method.tasks)}, not {task}")
    if study.model.backbone not in BACKBONES:
        hint = nearest(study.model.backbone, list(BACKBONES))
        raise BadInput(
            f"model.backbone: no such choice: '{study.model.backbone}'{hint}; choose one of {', '.join(BACKBONES)}"
        )
    if BACKBONES[study.model.backbone].dense != study.task.dense:
        fitting = ", ".join(name for name, kind in BACKBONES.items() if kind.dense == study.task.dense)
        raise BadInput(f"model.backbone: '{study.model.backbone}' cannot do {task}; choose {fitting}")
    for site, backbone in study.model.backbones.items():
        if not method.mixes_backbones:
            can = ", ".join(name for name, kind in METHODS.items() if kind.mixes_backbones)
            raise BadInput(
                f"model.backbones: '{method.name}' needs the same network at every site; choose one of {can}"
            )
        if backbone not in BACKBONES or BACKBONES[backbone].dense != study.task.dense:
            fitting = ", ".join(name for name, kind in BACKBONES.items() if kind.dense == study.task.dense)
            raise BadInput(f"model.backbones: '{backbone}' of site '{site}' cannot do {task}; choose {fitting}")
    method.check_task(task)


def check_model(study: Study) -> None:
    """BadInput if the network lacks what the study wants of it."""
    model, method = study.model, study.method
    cuts = _cuts(model.backbone)
    if model.cut is not None and model.cut not in cuts:
        raise BadInput(f"model.cut: {model.backbone} has no cut '{model.cut}'; choose one of {', '.join(cuts)}")
    if model.batch_norm == "local" and not method.allows_local_norm:
        raise BadInput(f"model.batch_norm: '{method.name}' cannot keep it local; set model.batch_norm = 'average'")
    if method.name == "fedbn" and not norm_names(
        build(model.backbone, channels=1, outputs=2, size=64, norm=model.norm)
    ):
        raise BadInput(
            f"method.name: fedbn keeps batch-norm layers at the sites, and {model.backbone} with "
            f"model.norm = '{model.norm}' has none; choose a backbone with batch norm"
        )


def check_replay(study: Study) -> None:
    """BadInput if the study replays and cannot."""
    if study.replay is None:
        return
    if not study.method.takes_replay:
        can = ", ".join(name for name, method in METHODS.items() if method.takes_replay)
        raise BadInput(f"replay: '{study.method.name}' cannot replay; take the table out, or choose one of {can}")
    if study.replay.codes != "prior" and not study.generator.has_codes:
        raise BadInput(
            f"generator.name: '{study.generator.name}' has no codes to replay; "
            "set replay.codes = 'prior' to replay its samples, or choose vqvae2"
        )
    if study.replay.codes == "prior" and study.task.dense:
        raise BadInput("replay.codes: samples of a prior have no masks; choose final-encoder for segmentation")
    if study.data.size < SMALLEST_IMAGE:
        raise BadInput(f"data.size: generators need images of {SMALLEST_IMAGE} px or more, not {study.data.size}")


def check_tuning(study: Study) -> None:
    """BadInput if the study wants a generator trained in phases that cannot be, or that nobody trains."""
    if study.method.needs_generator() and study.data.size < SMALLEST_IMAGE:
        raise BadInput(f"data.size: generators need images of {SMALLEST_IMAGE} px or more, not {study.data.size}")
    if study.tuning is None or not study.tuning.on:
        return
    if not study.method.needs_generator() or not study.method.tunes_generator:
        raise BadInput(f"tuning: '{study.method.name}' trains no generator that way; take the table out")
    if not can_tune(study.generator):
        raise BadInput(f"tuning: '{study.generator.name}' is no GAN; set tuning.on = false, or choose a GAN")


def check_privacy(study: Study) -> None:
    """BadInput if the study wants differential privacy where it cannot be had."""
    if study.privacy is None:
        return
    parts = [*study.method.private_parts]
    if study.replay is not None and study.replay.ratio > 0:
        parts += ["generator", "prior"] if study.replay.codes == "prior" else ["generator"]
    with torch.device("meta"):  # its layers are looked at, its weights are not needed
        network = build(study.model.backbone, channels=1, outputs=2, size=64, norm=study.model.norm)
    facts = private.Facts(
        study.method.name,
        parts,
        study.method.privacy_obstacle(),
        network,
        study.generator.dp_obstacle(),
    )
    private.check(study.privacy, facts)


def _cuts(backbone: str) -> tuple[str, ...]:
    return tuple(BACKBONES[backbone].stages)[:-1]


def default_path() -> Path:
    """The embedded study that commands use when none is given."""
    return Path(__file__).with_name("default_study.toml")
