"""What a federation consists of, and what it and its sites need of rooms above them, which they must not import.
Engines live in `polyclinic.engines`, observers in `polyclinic.runner`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from polyclinic.federation.call import Call, Expected, Failure, Reply
from polyclinic.federation.ledger.keys import KeyRing
from polyclinic.federation.ledger.wire import Encoding
from polyclinic.federation.site import SitePosition
from polyclinic.federation.sums.settings import Federated
from polyclinic.json_types import JsonMapping, JsonObject
from polyclinic.settings import Settings

if TYPE_CHECKING:
    from polyclinic.data.parts import ImageSet
    from polyclinic.federation.federation import Federation
    from polyclinic.federation.layers.defence_and_poisoning import Defence, Poisoning
    from polyclinic.federation.operation import Operation
    from polyclinic.models import Backbone
    from polyclinic.privacy.settings import Privacy
    from polyclinic.tasks import Target, Task

#: images float [B, C, H, W] in [0, 1] and the task's targets, on the device
Batch = tuple[Tensor, Tensor]


class MethodLike(Protocol):
    """What a host and a federation use of a method (`methods.shared.method.Method`), besides its operations, which they
    look up by their names."""

    @property
    def name(self) -> str: ...
    @property
    def rounds(self) -> int: ...
    @property
    def traits(self) -> Any: ...
    def operation_named(self, name: str) -> Operation | None: ...
    def check_reply(self, federation: Federation, call: Call, reply: Reply) -> None: ...


class StudyLike(Protocol):
    """A study (`study.study.Study`), as far as a host and its sites read its tables."""

    @property
    def seed(self) -> int: ...
    @property
    def method(self) -> MethodLike: ...
    @property
    def engine(self) -> EngineLike: ...
    @property
    def federation(self) -> Federated: ...
    @property
    def privacy(self) -> Privacy | None: ...
    @property
    def defence(self) -> Defence | None: ...
    @property
    def poisoning(self) -> Poisoning | None: ...
    @property
    def generator(self) -> Settings | None: ...
    @property
    def tuning(self) -> Settings | None: ...
    @property
    def replay(self) -> Settings | None: ...


class EngineLike(Protocol):
    """The `[engine]` table: how numbers travel, what happens when a site fails, and how states are saved."""

    @property
    def wire(self) -> Encoding: ...
    @property
    def on_failure(self) -> Literal["continue", "stop"]: ...
    @property
    def quorum(self) -> float: ...
    @property
    def checkpoint_every(self) -> int: ...
    @property
    def durable(self) -> bool: ...


class OptimizerLike(Protocol):
    """The `[optimizer]` table (`training.optimizer.Optimizer`)."""

    @property
    def batch_size(self) -> int: ...
    @property
    def lr(self) -> float: ...
    @property
    def keep_state(self) -> bool: ...
    @property
    def augment(self) -> tuple[str, ...]: ...
    @property
    def balanced_batches(self) -> bool: ...
    def make(self, parameters: Iterable[nn.Parameter], round: int) -> torch.optim.Optimizer: ...
    def lr_in(self, round: int) -> float: ...


class TrainerLike(Protocol):
    """One network, and the ways to load, train and evaluate it (`training.loop.Trainer`)."""

    model: Backbone
    task: Task
    target: Target
    device: torch.device
    precision: str
    privacy: Privacy | None
    cut: str | None
    graphs: bool
    weights_stay: bool
    bounded_scores: bool
    stacked: Literal["auto", "always", "never"]
    metric: str | None
    kept: dict[str, Any]
    local_names: frozenset[str]
    initial_local: dict[str, Tensor]

    @property
    def optimizer(self) -> OptimizerLike: ...
    def load(self, weights: Mapping[str, Tensor]) -> Backbone: ...
    def within_bounds(self, observed: Tensor, targets: Tensor) -> Tensor: ...
    def state(self) -> dict[str, Tensor]: ...
    def weights(self, model: nn.Module | None = None) -> dict[str, Tensor]: ...
    def released_weights(self) -> dict[str, Tensor]: ...
    def split(self, model: Backbone) -> tuple[Backbone, Backbone]: ...
    def steps_in(self, part: ImageSet) -> int: ...
    def batches(self, part: ImageSet, rng: torch.Generator) -> Iterator[Batch]: ...
    def mixed(self, batches: Iterator[Batch], rng: torch.Generator) -> Iterator[Batch]: ...
    def one_pass(self, part: ImageSet, rng: torch.Generator) -> Iterator[Batch]: ...
    def batch(self, part: ImageSet, index: Tensor, draws: torch.Generator | Tensor) -> Batch: ...
    def examples(self, part: ImageSet, rng: torch.Generator) -> Iterator[Batch]: ...
    def in_order(self, part: ImageSet) -> Iterator[Batch]: ...
    def latents(self, images: np.ndarray) -> np.ndarray: ...
    def train(
        self,
        batches: Iterator[Batch],
        steps: int,
        optimizer: torch.optim.Optimizer,
        *,
        class_weights: Tensor | None = None,
        correct: Callable[[nn.Module], None] | None = None,
        model: nn.Module | None = None,
        objective: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> float: ...
    def forward(self, images: Tensor, model: nn.Module | None = None) -> Tensor: ...
    def loss(self, output: Tensor, targets: Tensor, class_weights: Tensor | None = None) -> Tensor: ...
    def evaluate(self, part: ImageSet) -> dict[str, Tensor]: ...
    def evaluate_parts(self, parts: Sequence[ImageSet]) -> list[dict[str, Tensor]]: ...
    def note_batches(self) -> contextlib.AbstractContextManager[list[Tensor]]: ...
    def random_shares(self, rng: torch.Generator) -> contextlib.AbstractContextManager[None]: ...
    def autocast(self) -> contextlib.AbstractContextManager: ...


class Engine(Protocol):
    """Carries calls to sites. A failing site is a `Failure` in the answer, never an exception."""

    #: true where all sites live in one run folder, so that the runner may look into each
    simulation: bool

    def call(self, calls: list[Call]) -> Iterable[Reply | Failure]:
        """Answers in the order of the calls; calls to different sites may run at the same time.

        Sites may work while the answers are being taken, so that not all of them lie in memory at once.
        """

    def checkpoint(self) -> dict[str, SitePosition]:
        """Make the state of every site durable, and say where each stands."""

    def saved_positions(self) -> dict[str, SitePosition]:
        """Where the states of the sites that lie on disk stand; writes nothing."""
        return {}

    def prune(self, positions: dict[str, SitePosition]) -> None:
        """Forget older states of the sites: a checkpoint with these positions is durable."""

    def restore(self, positions: dict[str, SitePosition]) -> None:
        """Put every site back to where a checkpoint found it."""

    def close(self) -> None:
        """Free processes and files."""


class Observer:
    """This one does nothing; `runner.recorder.Recorder` scores models, keeps the best and writes the history."""

    #: the weights of the best round so far, which a checkpoint keeps
    best_weights: dict[str, Tensor] | None = None

    def asking(self, operation: str, sites: Sequence[str]) -> None:
        """Sites are about to be asked for an operation."""

    def failed(self, failure: Failure) -> None:
        """A site has failed."""

    def warned(self, sentence: str) -> None:
        """Something in the run went otherwise than the study asked."""

    def evaluate(self, federation: Federation, weights: Mapping[str, Tensor] | None) -> None:
        """A method has a model that may be scored in this round; without weights, each site has its own."""

    def rounds_without_progress(self, federation: Federation) -> int:
        """Rounds since the best validation score; 0 where nothing was scored."""
        return 0

    def handed_over(self, federation: Federation, site: str, weights: Mapping[str, Tensor]) -> None:
        """A site has finished its turn with these weights."""

    def round_done(self, federation: Federation, rounds: int, seconds: float) -> None:
        """One of `rounds` rounds is over."""

    def memory(self) -> JsonObject:
        """What a checkpoint keeps of the observer besides the best weights, as JSON values."""
        return {}

    def restore(self, memory: JsonMapping, best: dict[str, Tensor] | None) -> None:
        """Take over what `memory` gave, and the best weights."""


@dataclass(frozen=True, kw_only=True)
class FederationSpec:
    """What a federation consists of."""

    study: StudyLike
    sites: tuple[str, ...]
    #: the run folder
    folder: Path
    #: the weights that the study's network begins with
    initial: Mapping[str, Tensor]
    #: what parcels of each kind must look like
    expected: Mapping[str, Expected]
    #: the coordinator's own trainer, for methods in which it trains as well
    trainer: TrainerLike
    #: channels, height and width of the images
    image_shape: tuple[int, ...] = ()
    #: the networks of sites that have another one, by site
    backbones: Mapping[str, str] = field(default_factory=dict)
    #: the coordinator's keys in a deployed run
    keys: KeyRing | None = None
    #: where the coordinator's weights lie
    device: str = "cpu"

    @property
    def run_name(self) -> str:
        """The name of the run in secure sums: the masks of a simulated one follow from the seed, wherever it lies."""
        return self.folder.name if self.keys else f"seed {self.study.seed}"
