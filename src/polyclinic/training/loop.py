"""The trainer: what any site (or a coordinator with images of its own) trains and evaluates with.

It holds one model per process, into which weights are loaded before each piece of work, and knows the study's
task, optimiser and device. It knows nothing of sites or methods.
"""

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from polyclinic.data.parts import ImageSet
from polyclinic.federation.collaborators import Batch
from polyclinic.models import Backbone, split
from polyclinic.privacy.settings import Privacy
from polyclinic.tasks import Target, Task
from polyclinic.training.augmentation import Draws, augment, mix
from polyclinic.training.batches import ImageFetcher, shuffled_indices
from polyclinic.training.gpu.graphs import hooks_of, learner
from polyclinic.training.image_draws import draw_shares, hold_rows_of_few
from polyclinic.training.optimizer import Optimizer

EVALUATION_BATCH = 256


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
    #: sides of the patches of volumes; none for images
    patch: tuple[int, ...] = ()


class Trainer:
    """One model, and the ways to load, train and evaluate it."""

    def __init__(self, model: Backbone, spec: TrainerSpec) -> None:
        self.device = torch.device(spec.device)
        self.model = model.to(self.device)
        if self.device.type == "cuda":
            last = torch.channels_last_3d if model.volumes else torch.channels_last
            self.model = self.model.to(memory_format=last)  # type: ignore[call-overload]
        self.kept: dict[str, Any] = {}  # made once for the network, such as graphs, and used for all sites
        self._layers = list(self.model.modules())
        self.hooks = hooks_of(self.model)  # the network's own
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
        kept = spec.frozen_features
        self.fetcher = ImageFetcher(self.model, self.device, dense=spec.task.dense, frozen_features=kept)
        self._noted: list[Tensor] | None = None
        self.shares: torch.Generator | None = None  # see `random_shares`
        self.stacked = spec.stacked
        self.graphs = spec.graphs and self.device.type == "cuda"

    def with_optimizer(self, optimizer: Optimizer) -> "Trainer":
        """A trainer of the same network with other settings of the optimiser, such as a site's own batch size."""
        other = copy.copy(self)
        other.optimizer = optimizer
        return other

    # --- weights ----------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> Backbone:
        """The model with these weights in it; names that `weights` leaves out keep their values."""
        self.fetcher.forget_weights()
        own = self.state()
        if weights:  # a GPU copies those that lie in memory as their targets do in one kernel
            torch._foreach_copy_([own[name] for name in weights], list(weights.values()))
        return self.model

    def state(self) -> dict[str, Tensor]:
        """The model's own weights and buffers by name. Where a layer took the place of another, what was made for the
        former layers, such as a recorded step, is forgotten."""
        layers = list(self.model.modules())
        if layers != self._layers:
            self._layers[:] = layers  # also those of `with_optimizer`
            self.kept.clear()
        return dict(self.model.state_dict())

    def weights(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        """A copy, on the CPU, of all weights and buffers of the model."""
        state = self.state() if model is None else model.state_dict()
        return {name: value.clone() if value.is_cpu else value.cpu() for name, value in state.items()}

    @torch.no_grad()
    def released_weights(self) -> dict[str, Tensor]:
        """The same for a parcel, which stays on the device where weights do."""
        if not self.weights_stay:
            return self.weights()
        state = self.state()
        copies = [torch.empty_like(value, memory_format=torch.contiguous_format) for value in state.values()]
        torch._foreach_copy_(copies, list(state.values()))
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
        return (self.batch(part, index, rng) for index in shuffled_indices(part, self.optimizer, rng))

    def mixed(self, batches: Iterator[Batch], rng: torch.Generator) -> Iterator[Batch]:
        """Batches with mixup, where the study wants that."""
        if "mixup" not in self.optimizer.augment:
            return batches
        return (mix(images, self.task.mixable(targets, self.target), rng) for images, targets in batches)

    def one_pass(self, part: ImageSet, rng: torch.Generator) -> Iterator[Batch]:
        """Every image once, shuffled, in floor(|D| / b) batches of nearly the same size."""
        order = torch.randperm(len(part), generator=rng)
        for index in order.tensor_split(self.steps_in(part)):
            yield self.batch(part, index, rng)

    def batch(self, part: ImageSet, index: Tensor, draws: Draws) -> Batch:
        """The images at `index`, augmented, with their targets, on the device."""
        kinds = self.optimizer.augment
        if self._noted is not None:
            self._noted.append(index)
        images, labels, masks = self.fetcher.fetch(part, index.numpy(), augmented=bool(kinds))
        if kinds:
            images, masks = augment(images, masks, kinds, draws)
        return images, self.task.targets(labels, masks)

    def in_order(self, part: ImageSet) -> Iterator[Batch]:
        """All images once, in order, in large batches."""
        for start in range(0, len(part), EVALUATION_BATCH):
            index = np.arange(start, min(start + EVALUATION_BATCH, len(part)))
            images, labels, masks = self.fetcher.fetch(part, index, augmented=bool(self.optimizer.augment))
            yield images, self.task.targets(labels, masks)

    def examples(self, part: ImageSet, rng: torch.Generator) -> Iterator[Batch]:
        """What a network learns from: all images once, in order; of volumes patches, drawn by `rng`."""
        return self.in_order(part)

    def latents(self, images: np.ndarray) -> np.ndarray:
        """What the frozen layers give for images; see `ImageFetcher`."""
        return self.fetcher.latents(images)

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
        """Until the block ends, images have random shares in every gradient (`image_draws`)."""
        before, self.shares = self.shares, rng
        try:
            with hold_rows_of_few(self.model):
                yield
        finally:
            self.shares = before

    # --- training ---------------------------------------------------------------------------------

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
    ) -> float:
        """Take `steps` optimiser steps; the mean loss over them. `correct` may change gradients before a step.

        `model` is another network than the trainer's own, such as a part of it. `objective` is another loss of images
        and targets than the task's.
        """
        model = (self.model if model is None else model).train()
        learn = learner(self, model, class_weights) if self.graphs and objective is None else None
        total = torch.zeros((), device=self.device)
        for images, targets in itertools.islice(batches, steps):
            optimizer.zero_grad(set_to_none=True)
            if learn is not None:
                loss = learn(images, targets)
            else:
                loss = self.learn(images, targets, objective or self._objective_of(model, class_weights))
            if correct is not None:
                correct(model)
            optimizer.step()
            total += loss.detach()
        return float(total) / steps

    def learn(self, images: Tensor, targets: Tensor, objective: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The loss of a batch, whose gradients lie in the network then."""
        loss = objective(images, targets)
        loss.backward()
        return loss

    def _objective_of(self, model: nn.Module, class_weights: Tensor | None) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda images, targets: self.loss(self.forward(images, model), targets, class_weights)

    def forward(self, images: Tensor, model: nn.Module | None = None) -> Tensor:
        with self.autocast():
            return (model or self.model)(images)

    def autocast(self) -> contextlib.AbstractContextManager:
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def loss(self, output: Tensor, targets: Tensor, class_weights: Tensor | None = None) -> Tensor:
        """The mean loss of a batch; `class_weights` [C] weigh classes, also those of mixed targets [B, C]."""
        return self.task.loss(output.float(), targets, self.target, self.image_weights(targets, class_weights))

    def image_weights(self, targets: Tensor, class_weights: Tensor | None) -> Tensor | None:
        """A weight for each image of a batch, [B]: that of its class, times its random share; None: all alike."""
        weights = None
        if class_weights is not None:
            weights = targets @ class_weights if targets.is_floating_point() else class_weights[targets]
        if self.shares is None:
            return weights
        shares = draw_shares(len(targets), self.shares).to(targets.device)
        return shares if weights is None else weights * shares

    # --- evaluation -------------------------------------------------------------------------------

    @torch.no_grad()
    def outputs(self, part: ImageSet) -> Iterator[tuple[Tensor, Tensor]]:
        """What the network gives for all images of a part and their targets, in order, in large batches."""
        self.model.eval()
        for images, target in self.in_order(part):
            yield self._answer(images), target

    def evaluate(self, part: ImageSet) -> dict[str, Tensor]:
        """Additive sums of the task's metrics over all images of a part."""
        return self.evaluate_parts([part])[0]

    @torch.no_grad()
    def evaluate_parts(self, parts: Sequence[ImageSet]) -> list[dict[str, Tensor]]:
        """The same for each of several parts, none of them empty, whose images go through the network together."""
        self.model.eval()
        batches = self.in_order(parts[0])
        if len(parts) > 1:
            batches = join_small(itertools.chain.from_iterable(map(self.in_order, parts)))
        passed: Iterable[tuple[Tensor, ...]] = ((self._answer(images), target) for images, target in batches)
        if not self.task.dense:  # small outputs: the GPU is waited for once
            passed = [tuple(map(torch.cat, zip(*passed, strict=True)))]
        observed, targets = [], []
        for output, target in passed:
            observed.append(self.task.observe(output, target, self.target).cpu())
            targets.append(target.cpu())
        sizes, found = [len(part) for part in parts], []
        rows = zip(parts, torch.cat(observed).split(sizes), torch.cat(targets).split(sizes), strict=True)
        for part, seen, truth in rows:
            cases = None if part.cases is None else torch.from_numpy(part.cases.copy())
            found.append(self.task.sums(self.within_bounds(seen, truth), truth, cases, self.target))
        return found

    def _answer(self, images: Tensor) -> Tensor:
        """What the network, in evaluation mode, gives for images, float32 [B, ...]."""
        return self.forward(images).float()

    def within_bounds(self, observed: Tensor, targets: Tensor) -> Tensor:
        """Observations of which no image's share in a score is larger than the site or the study's privacy wants."""
        found = self.task.bounded(observed, self.target) if self.bounded_scores else observed
        if self.privacy is not None and self.privacy.score_noise is not None:
            found = self.task.near(found, targets, self.target)
        return found


def join_small(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The same images in the same order, neighbours that are no more than a large batch as one."""
    waiting: list[Batch] = []
    for batch in itertools.chain(batches, [None]):
        count = sum(len(targets) for _, targets in waiting)
        if waiting and (batch is None or count + len(batch[1]) > EVALUATION_BATCH):
            images, targets = zip(*waiting, strict=True)
            yield waiting[0] if len(waiting) == 1 else (torch.cat(images), torch.cat(targets))
            waiting = []
        if batch is not None:
            waiting.append(batch)
