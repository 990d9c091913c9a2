"""The tables of a study, and the study that they make up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import tomli_w
from pydantic import Field, SerializeAsAny, ValidationError, field_validator, model_validator

from polyclinic import plugins
from polyclinic.data.datasets import own_settings
from polyclinic.data.partitions import Sites
from polyclinic.data.source import Source
from polyclinic.encoders import ENCODERS
from polyclinic.errors import BadInput
from polyclinic.federation.arriving.settings import Incoming
from polyclinic.federation.leaving.defence_settings import Defence
from polyclinic.federation.leaving.kinds import KINDS, KindNames
from polyclinic.federation.summing.settings import Federated
from polyclinic.formats import STUDY_FORMAT, check_format
from polyclinic.generators import GENERATORS, Generator
from polyclinic.generators.private_tuning import PrivateTuning
from polyclinic.generators.vqvae2.model import VQVAE2
from polyclinic.messages import sentences
from polyclinic.methods import Method
from polyclinic.methods.shared.generative_replay import GenerativeReplay, Replay, with_replay
from polyclinic.models import BACKBONES, NORMS, RANDOM
from polyclinic.privacy.settings import Privacy
from polyclinic.registry import is_restricted
from polyclinic.settings import Settings, nearest, variant
from polyclinic.study.audit_settings import Audit
from polyclinic.study.changes import _changed
from polyclinic.study.checks import (
    _backbone,
    check_generator,
    check_model,
    check_privacy,
    check_replay,
    check_sites,
    check_task,
    check_training,
    check_tuning,
)
from polyclinic.study.plugged import check_attacks, check_kinds
from polyclinic.study.sum_checks import check_sums
from polyclinic.study.variants import VARIANTS, default_generator, fit_to_variants
from polyclinic.tasks import TASKS, Task
from polyclinic.training.optimizer import Optimizer


class Model(Settings):
    """The `[model]` table: the network, and what of it stays at the sites."""

    backbone: str = Field(
        "small-cnn",
        description=f"the network: {', '.join(BACKBONES.builtin)}; an encoder, which gets a linear head "
        f"({', '.join(name for name in ENCODERS.builtin if name not in BACKBONES.builtin)}); or any importable one, "
        "package.module:callable",
    )
    backbones: dict[str, str] = Field(
        {}, description='networks of sites that have another one: { north = "resnet18" }; where models are not averaged'
    )
    arguments: dict[str, Any] = Field(
        {}, description="arguments of an importable network: { spatial_dims = 2 }; channels and outputs are filled in"
    )
    weights: str = Field(
        RANDOM,
        min_length=1,
        description="first weights: random, public (those that come with the backbone), or a file of them "
        "(.safetensors, or torch's .pt), relative to where polyclinic is started; what of it fits the network is taken "
        "over",
    )
    weights_sha256: str | None = Field(
        None,
        pattern="^[0-9a-f]{64}$",
        description="SHA-256 of the file of `weights`; `polyclinic deploy submit` writes it, for the sites to see",
    )
    freeze: str | None = Field(
        None, description="the layer up to which the network is not trained and keeps its first weights"
    )
    input_size: int | None = Field(
        None,
        ge=16,
        le=1024,
        description="side to which images are resized on the device before the first layer; if not given, the "
        "backbone's own choice, which for most is the images' own size",
    )
    norm: Literal[*NORMS] = Field(  # type: ignore[valid-type]
        "batch",
        description="batch normalisation, group normalisation, or frozen: batch normalisation that keeps the "
        "statistics, factors and offsets of the first weights",
    )
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
    metric: str | None = Field(
        None,
        description="the validation metric that chooses the released round: accuracy, balanced_accuracy, auc, mae, "
        "rmse, dice or loss, as the task has it; the task's own if not given. Equal scores: the lower loss",
    )
    final: Literal["test", "validation", "none"] = Field(
        "test",
        description="images that the released model is scored on at the end; with validation, as in a search of "
        "settings, and with none, sites do not open their test images",
    )
    handovers: Literal["none", "last", "all"] = Field(
        "last", description="rounds whose hand-overs a serial method keeps for `polyclinic forgetting`"
    )


class EngineSettings(Settings):
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
    graphs: Literal["auto"] | bool = Field(
        "auto",
        description="on a GPU: record a training step as a CUDA graph and replay it; auto does so where it pays",
    )
    stacked: Literal["auto", "always", "never"] = Field(
        "auto",
        description="train simulated sites' networks as one stacked network where the method can (felicia, fedavg and "
        "methods built on its training, standalone): auto does so on a GPU where it pays; part of the result's last "
        "bits",
    )
    reproducible: bool = Field(
        False,
        description="forbid every choice that rounds differently: CUDA graphs, stacked sites, fused optimisers, and on "
        "a GPU sums without a fixed order; slower",
    )
    deadline: float | None = Field(
        None,
        gt=0,
        description="seconds a site may take for one operation; sites run in worker processes then",
    )
    silence: float = Field(
        60.0, gt=0, description="nvflare: seconds without a sign of life after which a site counts as lost"
    )
    approval_wait: float = Field(
        86400.0, ge=0, description="nvflare: seconds to wait for the people of the sites to approve the study"
    )
    on_failure: Literal["continue", "stop"] = Field(
        "continue",
        description="when a site fails: go on with the others, or stop (a stopped run can be resumed)",
    )
    quorum: float = Field(0.5, gt=0, le=1, description="share of the sites that must be left for a round to go on")
    checkpoint_every: int = Field(1, ge=0, description="rounds between checkpoints; 0 for none")
    durable: bool = Field(
        True,
        description="a checkpoint is on disk before the run goes on, and survives a loss of power (fsync); false is "
        "faster, for scratch work",
    )

    @model_validator(mode="after")
    def _reproducible(self) -> Self:
        if self.reproducible and (self.graphs is True or self.stacked == "always"):
            raise ValueError("reproducible forbids graphs = true and stacked = 'always'; set them to 'auto'")
        return self

    @field_validator("workers")
    @classmethod
    def _workers(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError("must be at least 1, or 'auto'")
        return value


class Logging(Settings):
    """The `[logging]` table: where curves of a run are written besides `history.jsonl`. It changes no result."""

    to: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] = Field(
        (),
        description="programs to write logs for, into the folder `logs` of the run: tensorboard, mlflow, wandb "
        "(offline); one that is not installed is named and left out",
    )


class PolicySettings(Settings):
    """The `[policy]` table: what simulated sites let out. A deployed site has a policy of its own."""

    kinds: KindNames = Field(
        tuple(KINDS.builtin), description="kinds of parcel that may leave a site; those of plug-ins must be named"
    )
    incoming: Incoming | None = Field(
        None, description="have simulated sites inspect what arrives, as deployed ones do: { on = true }"
    )
    shares: Literal["random", "equal"] = Field(
        "equal", description="how much an image weighs in a site's gradient: equal, or random, as at deployed sites"
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
        elif isinstance(method, Method) and tables.get("replay") and method.traits.takes_replay:
            tables["method"] = method = with_replay(method)
        if isinstance(method, Method) and method.needs_generator():
            usual = default_generator(method)
            tables.setdefault("generator", GENERATORS[usual](name=usual))
            if method.traits.tunes_generator and tables["generator"].tunable:
                tables.setdefault("tuning", PrivateTuning())
        return tables

    @model_validator(mode="after")
    def _fits_together(self) -> Study:
        check_task(self)
        check_model(self)
        check_training(self)
        check_replay(self)
        check_tuning(self)
        check_generator(self)
        check_sites(self)
        check_privacy(self)
        check_sums(self)
        check_kinds(self)
        return self

    def with_settings(self, changes: Mapping[str, Any]) -> Study:
        """This study with some settings changed: `study.with_settings({"method.rounds": 5})`."""
        tables = self.as_tables()
        return parse_study(fit_to_variants(tables, _changed(tables, changes), changes))

    def as_tables(self) -> dict[str, Any]:
        """Plain tables, as in a TOML file, every default written out."""
        tables = _without_none(self.model_dump(mode="json"))
        newer = {"model": "arguments", "optimizer": "batch_sizes", "data": "columns"}
        for table, name in ((tables, "plugins"), *((tables[table], name) for table, name in newer.items())):
            if not table.get(name, True):  # as in studies from before there were any
                del table[name]
        if self.model.weights == RANDOM:
            del tables["model"]["weights"]
        if self.federation == Federated():
            del tables["federation"]
        if self.policy.shares == "equal":
            del tables["policy"]["shares"]
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
        return self.model.cut or (_backbone(self).default_cut() if self.method.traits.needs_cut else None)


PLAIN: dict[str, type[Settings]] = {
    "model": Model,
    "optimizer": Optimizer,
    "replay": Replay,
    "tuning": PrivateTuning,
    "privacy": Privacy,
    "defence": Defence,
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
        *(f"{name}: no such table{nearest(name, known)}; the tables are {', '.join(known)}" for name in unknown),
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
    if issubclass(kind, Source):
        value = own_settings(kind, value)
    try:
        return kind.model_validate(dict(value))
    except ValidationError as error:
        raise BadInput(sentences(error, name, kind)) from None


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
