"""The tables of a study that have no room of their own: model, evaluation, engine, logging, policy, audit."""

from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from polyclinic.attacks.attack import RECEIVER, Capability, ThreatModel
from polyclinic.attacks.gradient_inversion.settings import GradientInversion
from polyclinic.federation.ledger.kinds import KINDS, KindNames
from polyclinic.federation.ledger.wire import Encoding
from polyclinic.federation.policy import Incoming
from polyclinic.models import BACKBONES, NORMS, RANDOM
from polyclinic.models.encoders import ENCODERS
from polyclinic.settings import Settings


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
    freeze: str | None = Field(None, description="the layer up to which the network keeps its first weights")
    input_size: int | None = Field(
        None,
        ge=16,
        le=1024,
        description="side to which images are resized on the device before the first layer; if not given, the "
        "backbone's own choice, which for most is the images' own size",
    )
    norm: Literal[*NORMS] = Field(  # type: ignore[valid-type]
        "batch",
        description="batch, group or instance normalisation, or frozen: batch normalisation that keeps the "
        "statistics, factors and offsets of the first weights",
    )
    cut: str | None = Field(None, description="the layer after which a method may split the network")
    batch_norm: Literal["average", "local"] = Field(
        "average", description="batch-norm statistics travel and are averaged with the weights, or stay local"
    )


class Evaluation(Settings):
    """The `[evaluation]` table: when models are scored, and which one is released."""

    every: int = Field(1, ge=0, description="rounds between scores on validation images; 0 for none")
    select: Literal["best", "last"] = Field("best", description="release the best by validation score, or the last")
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
    statistics: bool = Field(
        False,
        description="whether deployed sites tell intervals, DeLong's and paired tests, and a coarse calibration of the "
        "released model, computed from their own test images, once at the end; simulations compute these by themselves",
    )
    handovers: Literal["none", "last", "all"] = Field("last", description="hand-overs kept for `polyclinic forgetting`")


class EngineSettings(Settings):
    """The `[engine]` table: where the work runs, and what happens when a site fails."""

    name: Literal["in-process", "ray", "nvflare"] = Field("in-process", description="what carries calls to sites")
    workers: int | Literal["auto"] = Field(
        "auto", description="worker processes (ray: actors) for sites that train at once; auto takes more where it pays"
    )
    address: str | None = Field(None, description="ray: address of a cluster to join; without one, Ray starts here")
    gpus: float | None = Field(None, ge=0, le=64, description="ray: GPUs of an actor, as 0.5; a quarter if not given")
    threads: int = Field(1, ge=1, description="threads a site computes with; part of the result's last bits")
    device: str = Field("auto", description="cpu, cuda, cuda:1, ...; auto takes a GPU where there is one")
    precision: Literal["auto", "fp32", "bf16"] = Field("auto", description="auto is bf16 on a GPU and fp32 on a CPU")
    graphs: Literal["auto"] | bool = Field(
        "auto", description="on a GPU: record a training step as a CUDA graph and replay it; auto does so where it pays"
    )
    stacked: Literal["auto", "always", "never"] = Field(
        "auto",
        description="train simulated sites' networks as one stacked network where the method can (felicia, feder, "
        "fedavg and methods built on its training, standalone): auto does so on a GPU where it pays; part of the "
        "result's last bits",
    )
    reproducible: bool = Field(
        False,
        description="forbid every choice that rounds differently: CUDA graphs, stacked sites, fused optimisers, "
        " and on a GPU sums without a fixed order; slower",
    )
    deadline: float | None = Field(None, gt=0, description="seconds of an operation; then in worker processes")
    silence: float = Field(60.0, gt=0, description="nvflare: seconds without a sign of life until a site is lost")
    approval_wait: float = Field(86400.0, ge=0, description="nvflare: seconds to wait for the sites' people to approve")
    on_failure: Literal["continue", "stop"] = Field(
        "continue", description="when a site fails: go on with the others, or stop (a stopped run can be resumed)"
    )
    quorum: float = Field(0.5, gt=0, le=1, description="share of the sites that must be left for a round to go on")
    checkpoint_every: int = Field(1, ge=0, description="rounds between checkpoints; 0 for none")
    wire: Encoding = Field(
        "exact",
        description="how numbers travel: exact, fp16 or int8 (rounded, with a scale for each tensor or row), or delta "
        "(what differs from the weights that came, nothing lost); the last three are compressed",
    )
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

    kinds: KindNames = Field(tuple(KINDS.builtin), description="kinds of parcel that may leave; name those of plug-ins")
    incoming: Incoming | None = Field(None, description="inspect what arrives at simulated sites, too: { on = true }")
    shares: Literal["random", "equal"] = Field(
        "equal", description="how much an image weighs in a site's gradient: equal, or random, as at deployed sites"
    )
    scores: Literal["fine", "coarse"] = Field(
        "fine", description="how scores leave a site: fine, or coarse, as from a deployed site with min_cohort = 10"
    )


#: what a grid compares
DefenceName = Literal["clip-and-noise", "sparsify", "prune", "quantise", "secure-sum", "deeper-cut"]


class Audit(Settings):
    """Without this table sites keep nothing, and a run cannot be audited."""

    keep_parcels: int = Field(1, ge=0, le=1000, description="random releases kept of an operation, with first and last")
    threat_model: tuple[Capability, ...] = Field(
        tuple(capability for capability in Capability if capability in RECEIVER),
        description="what the attacker sees, holds and knows: " + ", ".join(Capability),
    )

    own_images: str = Field(
        "auto",
        description="the attacker's own images, on which it trains decoders: other-sites (their held-out images), "
        "held-out (half of the site's own), phantoms, a source of data by its name, or none; auto takes other sites' "
        "where they are at hand",
    )
    gradient_inversion: GradientInversion | None = Field(
        None,
        description="settings of the search for images behind gradients and weights; if not given, the attack of "
        "Geiping et al. with as many steps as the audit's budget has",
    )
    patient_limit: float = Field(
        0.9,
        ge=0.5,
        lt=1,
        description="largest risk of a patient with which a model has withstood `polyclinic audit --patients`: the "
        "chance to tell a model that was trained on the patient from one that was not (0.5: a coin)",
    )
    secure_sum: bool = Field(False, description="attack only a round's mean over sites, all that a secure sum shows")
    defences: tuple[DefenceName, ...] = Field(
        get_args(DefenceName),
        description="what `polyclinic audit --grid` tries, where it fits: " + ", ".join(get_args(DefenceName)),
    )

    @property
    def threat(self) -> ThreatModel:
        granted = frozenset(self.threat_model)
        return ThreatModel(granted=granted - {Capability.SIMILAR_IMAGES} if self.own_images == "none" else granted)


@dataclass(frozen=True)
class Effort:
    """How much an audit tries (`--budget quick|standard|thorough`).

    Of each operation, `sites` sites with `releases` releases each are attacked (0: all).

    `images`: searched for in one update, or inverted in one parcel; `update_steps`, `latent_steps` and
    `projection_steps`: of the searches; `candidates`: images asked about, members and held-out ones each.
    """

    sites: int
    releases: int
    images: int
    update_steps: int
    latent_steps: int
    projected: int
    projection_steps: int
    candidates: int
    references: int = 4  #: reference models of membership inference, each a training of its own
    generator_steps: int = 100  #: of a reference generator, at most
    patient_references: int = 64  #: reference runs of `--patients`
    minutes: float = 0  #: attacks that would begin later are not tried; 0: as long as it takes


#: sites, releases, images, update steps, latent steps, projected, projection steps, candidates, then as named
EFFORTS = {
    "quick": Effort(1, 2, 8, 200, 300, 24, 60, 150, minutes=10),
    "standard": Effort(0, 0, 16, 1000, 1000, 64, 200, 500, references=8, generator_steps=1000, minutes=120),
    "thorough": Effort(
        0, 0, 32, 5000, 5000, 200, 1000, 2000, references=16, generator_steps=5000, patient_references=256
    ),
}
