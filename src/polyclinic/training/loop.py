"""The trainer: what any site (or a coordinator with images of its own) trains and evaluates with.

It holds one model per process, into which weights are loaded before each piece of work, and knows the study's
task, optimiser and device. It knows nothing of sites or methods.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from polyclinic.federation.collaborators import Batch
from polyclinic.models import split
from polyclinic.training.augmentation import Changes, augment, change, mix
from polyclinic.training.batches import Fetched, ImageFetcher, SiteBatches, shuffled_indices
from polyclinic.training.evaluation import EVALUATION_BATCH, answer, sums_of
from polyclinic.training.gpu.graphs import GraphedGradients, RecordedSteps
from polyclinic.training.image_draws import draw_shares, hold_rows_of_few
from polyclinic.training.network_state import NetworkState, copy_all, hooks_of
from polyclinic.training.optimizer import kept_optimizer

if TYPE_CHECKING:
    from polyclinic.data.parts import ImageSet
    from polyclinic.models import Backbone
    from polyclinic.privacy.settings import Privacy
    from polyclinic.tasks import Target, Task
    from polyclinic.training.optimizer import Optimizer


@dataclass(frozen=True, kw_only=True)
class TrainerSpec:
    """What a trainer knows of the study."""

    task: Task
    target: Target
    optimizer: Optimizer
    #: the layer after which the network may be split
    cut: str | None = None
    #: the weights that stay at each site (batch-norm statistics, say), and all weights before any training
    local_names: frozenset[str] = frozenset()
    initial: Mapping[str, Tensor] | None = None
    device: str = "cpu"
    precision: str = "fp32"
    privacy: Privacy | None = None
    #: whether weights that a simulated site releases stay on the GPU
    weights_stay: bool = False
    #: whether passes of a batch on a GPU are replayed as a CUDA graph (`GraphedGradients`)
    graphs: bool = False
    #: whether simulated sites' networks train as a stack (`stacking`)
    stacked: Literal["auto", "always", "never"] = "never"
    #: whether no image may have a larger share in a score than `Task.bounds` says, as at a site with coarse scores
    bounded_scores: bool = False
    #: the metric that chooses a round (`evaluation.metric`), the task's own if None
    metric: str | None = None
    #: whether what frozen layers give for images is kept and used in their place
    frozen_features: bool = False


class Trainer:
    """One model, and the ways to load, train and evaluate it."""

    def __init__(self, model: Backbone, spec: TrainerSpec) -> None:
        self.device = torch.device(spec.device)
        self.channels_last = self.device.type == "cuda"
        self.model = model.to(self.device)
        if self.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.kept: dict[str, Any] = {}  # made once for the network, such as graphs, and used for all sites
        self._state = NetworkState(self.model, changed=self.kept.clear)
        self._hooks = hooks_of(self.model)  # the network's own
        self.task = spec.task
        self.target = spec.target
        self.optimizer = spec.optimizer
        self.precision = spec.precision
        self.privacy = spec.privacy
        self.metric = spec.metric
        self.cut = spec.cut
        self.local_names = spec.local_names
        self.initial_local = {name: spec.initial[name] for name in sorted(spec.local_names)} if spec.initial else {}
        self.bounded_scores = spec.bounded_scores
        self.weights_stay = spec.weights_stay and self.device.type == "cuda"
        self._fetcher = ImageFetcher(
            self.model, self.device, dense=spec.task.dense, frozen_features=spec.frozen_features
        )
        self._noted: list[Tensor] | None = None
        self._shares: torch.Generator | None = None
        self.stacked = spec.stacked
        self.graphs = spec.graphs and self.device.type == "cuda"
        self.records_steps = self.graphs and spec.privacy is None and spec.optimizer.can_be_recorded

    def with_optimizer(self, optimizer: Optimizer) -> Trainer:
        """A trainer of the same network with other settings of the optimiser, such as a site's own batch size."""
        other = copy.copy(self)
        other.optimizer = optimizer
        return other

    # --- weights ----------------------------------------------------------------------------------

    def load(self, weights: Mapping[str, Tensor]) -> Backbone:
        """The model with these weights in it; names that `weights` leaves out keep their values."""
        self._fetcher.forget_weights()
        if weights:
            own = self.state()
            copy_all([own[name] for name in weights], list(weights.values()))
        return self.model

    def state(self) -> dict[str, Tensor]:
        """The model's own weights and buffers by name; see `NetworkState`."""
        return self._state()

    def parameters(self) -> list[nn.Parameter]:
        return self._state.parameters()

    def weights(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        """A copy, on the CPU, of all weights and buffers of the model."""
        state = self.state() if model is None else model.state_dict()
        return {name: value.clone() if value.is_cpu else value.cpu() for name, value in state.items()}

    def released_weights(self) -> dict[str, Tensor]:
        """The same for a parcel, which stays on the device where weights do."""
        if not self.weights_stay:
            return self.weights()
        state = self.state()
        copies = [torch.empty_like(value, memory_format=torch.contiguous_format) for value in state.values()]
        copy_all(copies, list(state.values()))
        return dict(zip(state, copies, strict=True))

    def split(self, model: Backbone) -> tuple[Backbone, Backbone]:
        """The model in two at the study's cut; both parts share their parameters with it."""
        return split(model, self.cut or model.default_cut())

    # --- batches ----------------------------------------------------------------------------------

    def steps_in(self, part: ImageSet) -> int:
        """Mini-batches in one pass: floor(|D| / b), at least one."""
        return max(1, len(part) // self.optimizer.batch_size)

    def batches(self, part: ImageSet, rng: torch.Generator) -> Iterator[Batch]:
        """Endless shuffled mini-batches, on the device."""
        return SiteBatches(self, part, rng)

    def indices(self, part: ImageSet, rng: torch.Generator) -> Iterator[Tensor]:
        """The same as indices of images, int64 [B]; see `shuffled_indices`."""
        return shuffled_indices(part, self.optimizer, rng)

    def one_pass(self, part: ImageSet, rng: torch.Generator) -> Iterator[Batch]:
        """Every image once, shuffled, in floor(|D| / b) batches of nearly the same size."""
        order = torch.randperm(len(part), generator=rng)
        for index in order.tensor_split(self.steps_in(part)):
            yield self.batch(part, index, rng)

    def batch(self, part: ImageSet, index: Tensor, draws: torch.Generator | Tensor) -> Batch:
        """The images at `index`, augmented, with their targets, on the device. `draws`: see `augment`."""
        if self._noted is not None:
            self._noted.append(index)
        images, labels, masks = self._fetch(part, index.numpy())
        images, masks = augment(images, masks, self.optimizer.augment, draws)
        return images, self.task.targets(labels, masks)

    def changed_batch(self, part: ImageSet, indices: Sequence[Tensor], drawn: Changes) -> Batch:
        """The batches at several indices as one, changed by what was drawn for their images."""
        if self._noted is not None:
            self._noted.extend(indices)
        images, labels, masks = self._fetch(part, torch.cat(list(indices)).numpy())
        images, masks = change(images, masks, self.optimizer.augment, drawn)
        return images, self.task.targets(labels, masks)

    @contextlib.contextmanager
    def note_batches(self) -> Iterator[list[Tensor]]:
        """Gives a list; until the block ends, the indices of the images of every batch are put into it."""
        before, self._noted = self._noted, []
        try:
            yield self._noted
        finally:
            self._noted = before

    @contextlib.contextmanager
    def random_shares(self, rng: torch.Generator) -> Iterator[None]:
        """Until the block ends, images have random shares in every gradient (`image_shares`)."""
        before, self._shares = self._shares, rng
        try:
            with hold_rows_of_few(self.model):
                yield
        finally:
            self._shares = before

    def in_order(self, part: ImageSet) -> Iterator[Batch]:
        """All images once, in order, in large batches."""
        for start in range(0, len(part), EVALUATION_BATCH):
            images, labels, masks = self._fetch(part, np.arange(start, min(start + EVALUATION_BATCH, len(part))))
            yield images, self.task.targets(labels, masks)

    def _fetch(self, part: ImageSet, index: np.ndarray) -> Fetched:
        return self._fetcher.fetch(part, index, augmented=bool(self.optimizer.augment))

    def image_size(self, part: ImageSet) -> int:
        """Numbers of one image as it is fetched; see `ImageFetcher`."""
        return self._fetcher.image_size(part, augmented=bool(self.optimizer.augment))

    def latents(self, images: np.ndarray) -> np.ndarray:
        """What the frozen layers give for images; see `ImageFetcher`."""
        return self._fetcher.latents(images)

    # --- work -------------------------------------------------------------------------------------

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
    ) -> float:
        """Take `steps` optimiser steps; the mean loss over them. `correct` may change gradients before a step.

        `model` is another network than the trainer's own, such as a part of it. `mixing` draws for mixup, where the
        study wants that. `objective` is another loss of images and targets than the task's.
        """
        model = self._state.train() if model in (None, self.model) else model.train()
        if mixing is not None and "mixup" in self.optimizer.augment:
            batches = (mix(images, self.task.mixable(targets, self.target), mixing) for images, targets in batches)
        if self.records_steps and model is self.model and correct is None and objective is None and self._knows(model):
            recorded = self._recorded_steps(optimizer, weighed=class_weights is not None)
            if recorded is not None:
                return (
                    recorded.train(batches, steps, lambda targets: self._image_weights(targets, class_weights)) / steps
                )
        total = torch.zeros((), device=self.device)
        learn = self._learner(model, class_weights, objective)
        for images, targets in itertools.islice(batches, steps):
            optimizer.zero_grad(set_to_none=True)
            loss = learn(images, targets)
            if correct is not None:
                correct(model)
            optimizer.step()
            total += loss
        return float(total) / steps

    def _learner(
        self,
        model: nn.Module,
        class_weights: Tensor | None,
        objective: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """What gives the loss of a batch and leaves its gradients in the model."""
        if self.graphs and objective is None and self._knows(model):
            weighed = class_weights is not None or self._shares is not None
            graphed = self._graphed_gradients(model, weighed=weighed)

            def learn_graphed(images: Tensor, targets: Tensor) -> Tensor:
                weights = self._image_weights(targets, class_weights)
                return graphed(images, targets, *([] if weights is None else [weights]))

            return learn_graphed

        def of_task(images: Tensor, targets: Tensor) -> Tensor:
            return self.loss(self.forward(images, model), targets, class_weights)

        loss_of = objective or of_task

        def learn(images: Tensor, targets: Tensor) -> Tensor:
            loss = loss_of(images, targets)
            loss.backward()
            return loss.detach()

        return learn

    def _recorded_steps(self, optimizer: torch.optim.Optimizer, *, weighed: bool) -> RecordedSteps | None:
        """Whole steps of the network by this optimiser as graphs; None where they cannot be recorded."""
        kept = None if self._shares is not None else kept_optimizer(optimizer, self.kept)
        if kept is None:
            return None
        if weighed not in kept.recorded:
            gradients = self._graphed_gradients(self.model, weighed=weighed)
            kept.recorded[weighed] = RecordedSteps(gradients, optimizer, self.device)
        found: RecordedSteps = kept.recorded[weighed]
        return found

    def _knows(self, model: nn.Module) -> bool:
        """Whether it is the trainer's network or a part that was cut from it, and nobody has hooked into its layers but
        our own random shares: what was recorded before would leave such a hook out."""
        children = dict(self.model.named_children())
        part = type(model) is type(self.model) and all(
            children.get(name) is child for name, child in model.named_children()
        )
        return part and (self._shares is not None or hooks_of(self.model) | hooks_of(model) == self._hooks)

    def _graphed_gradients(self, model: nn.Module, *, weighed: bool) -> GraphedGradients:
        """A recorded step of the network or a part: one for each choice of stages and of weights that are trained.

        `weighed`: its inputs are images, targets and a weight for each image."""
        key = f"graph: {self._what_learns(model)} {weighed} {self._shares is not None}"

        def loss(images: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
            return self.task.loss(self.forward(images, model).float(), targets, self.target, weights)

        if key not in self.kept:
            self.kept[key] = GraphedGradients(model, loss)
        return self.kept[key]

    def _what_learns(self, model: nn.Module) -> str:
        """The stages of the network or a part, and which of their weights are trained."""
        trained = [one.requires_grad for one in (self if model is self.model else model).parameters()]
        return f"{getattr(model, 'present', '')} {trained}"

    def forward(self, images: Tensor, model: nn.Module | None = None) -> Tensor:
        with self.autocast():
            return (model or self.model)(images)

    def loss(self, output: Tensor, targets: Tensor, class_weights: Tensor | None = None) -> Tensor:
        """The mean loss of a batch; `class_weights` [C] weigh classes, also those of mixed targets [B, C]."""
        return self.task.loss(output.float(), targets, self.target, self._image_weights(targets, class_weights))

    def _image_weights(self, targets: Tensor, class_weights: Tensor | None) -> Tensor | None:
        """A weight for each image of a batch, [B]: that of its class, times its random share; None: all alike."""
        weights = None
        if class_weights is not None:
            weights = targets @ class_weights if targets.is_floating_point() else class_weights[targets]
        if self._shares is None:
            return weights
        shares = draw_shares(len(targets), self._shares).to(targets.device)
        return shares if weights is None else weights * shares

    @torch.no_grad()
    def outputs(self, part: ImageSet) -> Iterator[tuple[Tensor, Tensor]]:
        """What the network gives for all images of a part and their targets, in order, in large batches."""
        self.model.eval()
        for images, target in self.in_order(part):
            yield answer(self, images), target

    def evaluate(self, part: ImageSet) -> dict[str, Tensor]:
        """Additive sums of the task's metrics over all images of a part."""
        [found] = self.evaluate_parts([part])
        return found

    def evaluate_parts(self, parts: Sequence[ImageSet]) -> list[dict[str, Tensor]]:
        """The same for each of several parts, none of them empty, whose images go through the network together."""
        self.model.eval()
        return sums_of(self, parts)

    def within_bounds(self, observed: Tensor, targets: Tensor) -> Tensor:
        """Observations of which no image's share in a score is larger than the site or the study's privacy wants."""
        found = self.task.bounded(observed, self.target) if self.bounded_scores else observed
        if self.privacy is not None and self.privacy.score_noise is not None:
            found = self.task.near(found, targets, self.target)
        return found

    def autocast(self) -> contextlib.AbstractContextManager:
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)
