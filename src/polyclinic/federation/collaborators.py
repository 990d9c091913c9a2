"""Protocols: what a federation and its sites need of rooms above them, which they must not import."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from polyclinic.data.parts import ImageSet
    from polyclinic.models import Backbone
    from polyclinic.privacy.settings import Privacy
    from polyclinic.tasks import Target, Task

#: images float [B, C, H, W] in [0, 1] and the task's targets, on the device
Batch = tuple[Tensor, Tensor]


class MethodLike(Protocol):
    """What a host uses of a method (`methods.shared.method.Method`), besides its operations, which it looks up by
    their names."""

    @property
    def name(self) -> str: ...
    @property
    def rounds(self) -> int: ...
    def may_stack(self, trainer: TrainerLike, sites: int, operation: str) -> bool: ...


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
    def make(self, parameters: Iterator[nn.Parameter], round: int) -> torch.optim.Optimizer: ...
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
    state: Callable[[], dict[str, Tensor]]

    @property
    def optimizer(self) -> OptimizerLike: ...
    def load(self, weights: Mapping[str, Tensor]) -> Backbone: ...
    def within_bounds(self, observed: Tensor, targets: Tensor) -> Tensor: ...
    def weights(self, model: nn.Module | None = None) -> dict[str, Tensor]: ...
    def released_weights(self) -> dict[str, Tensor]: ...
    def split(self, model: Backbone) -> tuple[Backbone, Backbone]: ...
    def steps_in(self, part: ImageSet) -> int: ...
    def batches(self, part: ImageSet, rng: torch.Generator) -> Iterator[Batch]: ...
    def indices(self, part: ImageSet, rng: torch.Generator) -> Iterator[Tensor]: ...
    def one_pass(self, part: ImageSet, rng: torch.Generator) -> Iterator[Batch]: ...
    def batch(self, part: ImageSet, index: Tensor, draws: torch.Generator | Tensor) -> Batch: ...
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
        mixing: torch.Generator | None = None,
        objective: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> float: ...
    def forward(self, images: Tensor, model: nn.Module | None = None) -> Tensor: ...
    def loss(self, output: Tensor, targets: Tensor, class_weights: Tensor | None = None) -> Tensor: ...
    def evaluate(self, part: ImageSet) -> dict[str, Tensor]: ...
    def evaluate_parts(self, parts: Sequence[ImageSet]) -> list[dict[str, Tensor]]: ...
    def note_batches(self) -> contextlib.AbstractContextManager[list[Tensor]]: ...
    def random_shares(self, rng: torch.Generator) -> contextlib.AbstractContextManager[None]: ...
    def autocast(self) -> contextlib.AbstractContextManager: ...
