"""Passes of evaluation: small batches are joined, and on a GPU a pass is a CUDA graph where that pays."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyclinic.federation.collaborators import Batch
from polyclinic.training.gpu.graphs import GraphedFunction, new_pool

if TYPE_CHECKING:
    from polyclinic.data.parts import ImageSet
    from polyclinic.training.loop import Trainer

EVALUATION_BATCH = 256
#: bytes of a batch of images up to which a pass of evaluation is recorded: with more the GPU, and not Python, takes the
#: time, and a graph would hold on to much memory
MOST_RECORDED_BYTES = 2**26


def answer(trainer: Trainer, images: Tensor) -> Tensor:
    """What the trainer's network, in evaluation mode, gives for images, float32 [B, ...]."""
    if not trainer.graphs or images.nbytes > MOST_RECORDED_BYTES:
        return trainer.forward(images).float()
    key = f"evaluation: {trainer.model.frozen_shape}"
    if key not in trainer.kept:
        trainer.kept[key] = GraphedFunction(
            lambda images: trainer.forward(images).float(), "engine.graphs: evaluation", pool=new_pool(trainer.device)
        )
    found: Tensor = trainer.kept[key](images)
    return found.clone()  # the next pass overwrites it


@torch.no_grad()
def sums_of(trainer: Trainer, parts: Sequence[ImageSet]) -> list[dict[str, Tensor]]:
    """Additive sums of the task's metrics for each of several parts, which go through the network together."""
    batches = itertools.chain.from_iterable(trainer.in_order(part) for part in parts)
    passed: Iterator[tuple[Tensor, ...]] = ((answer(trainer, images), target) for images, target in join_small(batches))
    if not trainer.task.dense:  # small outputs: the GPU is waited for once
        passed = iter([tuple(torch.cat(some) for some in zip(*passed, strict=True))])
    observed, targets = [], []
    for output, target in passed:
        observed.append(trainer.task.observe(output, target, trainer.target).cpu())
        targets.append(target.cpu())
    sizes = [len(part) for part in parts]
    rows = zip(parts, torch.cat(observed).split(sizes), torch.cat(targets).split(sizes), strict=True)
    return [_sums(trainer, part, found, truth) for part, found, truth in rows]


def _sums(trainer: Trainer, part: ImageSet, observed: Tensor, targets: Tensor) -> dict[str, Tensor]:
    cases = None if part.cases is None else torch.from_numpy(part.cases.copy())
    return trainer.task.sums(trainer.within_bounds(observed, targets), targets, cases, trainer.target)


def join_small(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The same images in the same order, neighbours that are no more than a large batch as one."""
    waiting: list[Batch] = []
    for batch in batches:
        if waiting and sum(len(targets) for _, targets in (*waiting, batch)) > EVALUATION_BATCH:
            yield _join(waiting)
            waiting = []
        waiting.append(batch)
    yield _join(waiting)


def _join(batches: Sequence[Batch]) -> Batch:
    images, targets = zip(*batches, strict=True)
    return batches[0] if len(batches) == 1 else (torch.cat(images), torch.cat(targets))
